"""The options of a correction: read from a text, as on a command line, and checked by name and kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

from async_rl._suggestions import find_nearest

_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}


def split_options(text: str) -> tuple[str, dict[str, float | bool | None]]:
  """Returns a name, and the options that follow it after a colon: numbers, true, false or none.

  Raises:
    ValueError: if an option has no value or two, or a value is of another kind.

  >>> split_options("trm:max_bound=0.5,mean_bound=inf")
  ('trm', {'max_bound': 0.5, 'mean_bound': inf})
  """
  name, colon, rest = text.partition(":")
  options: dict[str, float | bool | None] = {}
  for part in rest.split(",") if colon else ():
    option, _, value = (x.strip() for x in part.partition("="))
    if not option or not value or option in options:
      raise ValueError(
        "*objective* must be a name, or one with options such as trm:max_bound=0.5,mean_bound=0.01, each of them once, "
        f"got objective={text!r}."
      )
    options[option] = _read(option, value)
  return name.strip(), options


def _read(option: str, value: str) -> float | bool | None:
  if value.lower() in _WORDS:
    return _WORDS[value.lower()]
  try:
    return float(value)
  except ValueError:
    raise ValueError(f"*{option}* must be a number, true, false or none, got {option}={value!r}.") from None


def check_options(name: str, functions: Iterable[Callable[..., Any]], options: Mapping[str, Any]) -> None:
  """Raises a ValueError unless each option is one of the functions', and a flag or a function where these have one.

  Numbers are left to the functions, which know their bounds.

  Args:
    name: the name of the correction.
    functions: the correction, and the statistics that it needs.
    options: the options by name.
  """
  parameters = [p for function in functions for p in inspect.signature(function).parameters.values()]
  defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
  constants = [option for option, default in defaults.items() if not callable(default)]
  for option, value in options.items():
    if option not in defaults:
      nearest = find_nearest(option, constants)
      remedy = f"; did you mean {nearest!r}?" if nearest else "."
      raise ValueError(f"*{option}* is not an option of {name!r}, which takes {', '.join(constants) or 'none'}{remedy}")
    default = defaults[option]
    if callable(default) and not callable(value):
      raise ValueError(f"*{option}* must be a function, got {option}={value!r}.")
    if isinstance(default, bool) and not isinstance(value, bool):
      raise ValueError(f"*{option}* must be True or False, got {option}={value!r}.")
