"""The persistent compilation cache: a second start of a run reads its programs in place of compiling them."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import platform
import sys
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from async_rl._buckets import cache_folder


@contextlib.contextmanager
def compilation_cache(enabled: bool) -> Iterator[None]:
  """Keeps the programs that this process compiles, and reads those that an earlier one kept; or does neither inside.

  They are kept in the folder that JAX was given, as by $JAX_COMPILATION_CACHE_DIR, else in `programs` of
  $ASYNC_RL_CACHE, by default ~/.cache/async_rl, for each kind of processor. Where that cannot be made, everything is
  compiled, and a line says so. JAX tells programs apart by their text, their devices, the compiler's version and its
  flags.

  Args:
    enabled: whether to do so, also after the context, whose end only turns on again what `False` turned off.
  """
  before = jax.config.values["jax_enable_compilation_cache"]
  if not enabled:
    jax.config.update("jax_enable_compilation_cache", False)
  elif jax.config.values["jax_compilation_cache_dir"] is None:
    _use_own_folder()
  jax_cache.reset_cache()  # JAX asks for these settings once, when it compiles for the first time
  try:
    yield
  finally:
    if not enabled:
      jax.config.update("jax_enable_compilation_cache", before)
      jax_cache.reset_cache()


def _use_own_folder() -> None:
  folder = cache_folder() / "programs" / _processor()
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    print(f"Compiled programs are not kept: {error}; name another folder by ASYNC_RL_CACHE.", file=sys.stderr)
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # there are dozens of small ones


def _processor() -> str:
  """Returns a short name of the kind of this machine's processor, since machines of several kinds may share a home."""
  features = ""
  with contextlib.suppress(OSError):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
  return hashlib.sha256((platform.machine() + features).encode()).hexdigest()[:8]
