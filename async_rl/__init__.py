"""Asynchronous reinforcement-learning post-training of language models in JAX, made to stay stable on stale data.

The folders are imported when they are first asked for: `import async_rl` loads none of them, and
`async_rl.stabilizers` then loads jax and optax only.
"""

import importlib

__version__ = "0.1.0"

__all__ = [
  "learning",
  "losses",
  "models",
  "recording",
  "rollout",
  "runtime",
  "sampling",
  "stabilizers",
  "tasks",
  "types",
]


def __getattr__(name: str):
  """Imports the submodule `name` on first access, see PEP 562."""
  if name not in __all__:
    raise AttributeError(f"module 'async_rl' has no attribute {name!r}")
  try:
    return importlib.import_module(f"async_rl.{name}")
  except ModuleNotFoundError as e:
    package = (e.name or "async_rl").split(".")[0]
    if package == "async_rl":
      raise
    raise ModuleNotFoundError(
      f"async_rl.{name} needs the package {package!r}, which is not installed; install async_rl[train].", name=e.name
    ) from e


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
