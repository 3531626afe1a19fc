"""One file per experiment: a docstring that states command, hardware, time and result, and a class `Config`."""

from __future__ import annotations

import importlib
import pkgutil

from async_rl.runtime import Experiment


def load_all() -> dict[str, type[Experiment]]:
  """The `Config` of every module in this folder, by name."""
  names = sorted(module.name for module in pkgutil.iter_modules(__path__))
  return {name: importlib.import_module(f"{__name__}.{name}").Config for name in names}
