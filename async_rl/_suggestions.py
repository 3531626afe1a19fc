"""The nearest of the known names, for errors about one that is not known. Needs the standard library only."""

import difflib
from collections.abc import Collection


def suggestion(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
  """Returns a clause that suggests the nearest of `names`, or lists them all if none is near.

  Args:
    name: the unknown name.
    names: the known ones.
    cutoff: the least similarity of a name that is suggested, from 0 to 1.

  >>> suggestion("tset", ["train", "test"]), suggestion("all", ["train", "test"])
  ("did you mean 'test'?", 'choose one of test, train')
  """
  nearest = find_nearest(name, names, cutoff)
  return f"did you mean {nearest!r}?" if nearest else f"choose one of {', '.join(sorted(names))}"


def find_nearest(name: str, names: Collection[str], cutoff: float = 0.6) -> str | None:
  """Returns the nearest of `names`, None if none is near; arguments as in `suggestion`."""
  return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)
