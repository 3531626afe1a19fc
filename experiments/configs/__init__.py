"""One file per experiment: a docstring (command, hardware, time, result), a class `Config`, and `SMOKE` options.

`SMOKE` makes it a run of seconds on two CPU devices, for the tests.
"""

from __future__ import annotations

import importlib
import pkgutil

from async_rl.runtime import Experiment


def load_all() -> dict[str, type[Experiment]]:
  """The `Config` of every module in this folder, by name."""
  names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
  return {name: importlib.import_module(f"{__name__}.{name}").Config for name in names}
