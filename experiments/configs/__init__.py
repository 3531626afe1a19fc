"""One file per experiment: a docstring (command, hardware, time, result), `Options` and `build`.

`Options` is a frozen dataclass of the options that users turn; `build` makes the experiment from it. A config that
shares another one's `Options` gives its own values as `DEFAULTS`. `SMOKE` are options that make it a run of seconds on
two CPU devices, for the tests. A file of the same form anywhere else is a config, too.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pathlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from typing import NamedTuple

from async_rl._suggestions import suggestion
from async_rl.runtime import Experiment
from async_rl.runtime import override

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


class Config(NamedTuple):
  """A config file.

  Attributes:
    name: its name, or its absolute path if it is not in this folder.
    description: the first line of its docstring.
    defaults: the options with its defaults.
    build: the function that makes the experiment from the options.
    smoke: the options of a run of seconds, by name.
  """

  name: str
  description: str
  defaults: Any
  build: Callable[[Any], Experiment]
  smoke: dict[str, Any]

  def options(self, **values: Any) -> Any:
    """Returns the options with some values replaced."""
    return override(self.defaults, **values)

  def experiment(self, options: Any) -> Experiment:
    """Returns the experiment with these options."""
    return dataclasses.replace(self.build(options), name=self.name)


def load(name: str) -> Config:
  """Loads a config by its name, or by the path of its file.

  Raises:
    ValueError: if there is no such config, or the file is not one.
  """
  if name.endswith(".py"):
    path = pathlib.Path(name).expanduser().absolute()
    return _config(str(path), _import_file(path))
  if name not in NAMES:
    raise ValueError(f"unknown config {name!r}: {suggestion(name, NAMES)}")
  return _config(name, importlib.import_module(f"{__name__}.{name}"))


def _import_file(path: pathlib.Path) -> ModuleType:
  """Imports the file under its own name, under which reward workers import its tasks."""
  if not path.is_file():
    raise ValueError(f"there is no config file {path}")
  if path.stem in sys.modules or importlib.util.find_spec(path.stem) is not None:
    module = importlib.import_module(path.stem)
    if pathlib.Path(module.__file__ or "").absolute() != path:
      raise ValueError(f"{path} has the name of another module, {module.__file__}; rename the file.")
    return module
  sys.path.insert(0, str(path.parent))
  return importlib.import_module(path.stem)


def _config(name: str, module: ModuleType) -> Config:
  make = getattr(module, "Options", None)
  defaults = getattr(module, "DEFAULTS", None) or (make and make())
  if defaults is None or not hasattr(module, "build"):
    raise ValueError(f"{module.__file__} is no config: it must define Options (or DEFAULTS) and build.")
  description = (module.__doc__ or name).strip().splitlines()[0]
  return Config(name, description, defaults, module.build, getattr(module, "SMOKE", {}))
