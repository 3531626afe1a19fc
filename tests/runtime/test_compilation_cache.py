import os
import re
import subprocess
import sys

import jax
import pytest

from async_rl.runtime._compilation_cache import compilation_cache

_PROGRAM = """
import sys

import jax

from async_rl import runtime

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)


def start(enabled):
  jax.clear_caches()
  with runtime.join_hosts(runtime.Devices(compilation_cache=enabled)):
    assert int(jax.jit(lambda x: x * 2 + 1)(20)) == 41
  found = len(hits)
  hits.clear()
  return found


jax.numpy.arange(3)  # as of users who have compiled something before they start a run
print(*map(start, eval(sys.argv[1])))
"""


def _run(folder, starts, **variables):
  """Returns how many programs each of a process' starts read."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
  environment = {**kept, "JAX_PLATFORMS": "cpu", "ASYNC_RL_CACHE": str(folder), **variables}
  command = [sys.executable, "-c", _PROGRAM, str(starts)]
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
  return list(map(int, done.stdout.split()))


def test_the_second_start_reads_what_the_first_one_compiled_unless_told_otherwise(tmp_path):
  assert _run(tmp_path, [True, True, False]) == [0, 1, 0]
  assert len(list((tmp_path / "programs").glob("*/*-cache"))) == 1
  assert _run(tmp_path, [False, True]) == [0, 1]


def test_the_folder_that_jax_was_given_goes_first(tmp_path):
  variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  _run(tmp_path, [True], **variables)
  assert list((tmp_path / "mine").glob("jit__lambda*-cache"))
  assert not (tmp_path / "programs").exists()


@pytest.mark.parametrize("at", ["", "programs"])
def test_a_folder_that_cannot_be_made_costs_time_alone(tmp_path, monkeypatch, capsys, at):
  folder = tmp_path / "cache"
  if at:
    folder.mkdir()
  (folder / at if at else folder).write_text("a file in its place")
  monkeypatch.setenv("ASYNC_RL_CACHE", str(folder))
  before = jax.config.values["jax_compilation_cache_dir"]
  jax.config.update("jax_compilation_cache_dir", None)
  try:
    with compilation_cache(True):
      assert jax.config.values["jax_compilation_cache_dir"] is None
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  assert re.fullmatch("Compiled programs are not kept: .*ASYNC_RL_CACHE.\n", capsys.readouterr().err)
