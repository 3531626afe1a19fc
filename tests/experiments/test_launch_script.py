"""The start-up script of a host, really run; only the machine's metadata and the bucket are not those of the cloud."""

import contextlib
import dataclasses
import os
import signal
import time

import launched_host
import pytest

from experiments.launch import _script
from experiments.launch._job import Job
from experiments.launch._topology import Topology

#: A training that ends with the statuses of a file, one after the other, and says what it was given.
STATUSES = """
import pathlib, sys
file = pathlib.Path("../../statuses")
status, *others = file.read_text().split()
file.write_text(" ".join(others))
print("training", *sys.argv[1:], flush=True)
sys.exit(int(status))
"""
#: A training that saves when it is asked to end.
SAVES = """
import signal, sys, time
def save(*_):
  print("saved", flush=True)
  sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(60)
"""


def job(*arguments, topology="v5e:2x4", **more):
  return Job("run", "quickstart", arguments, "gs://bucket/run", Topology.parse(topology), **more)


@pytest.fixture
def staging(tmp_path, monkeypatch):
  return launched_host.make_cloud(tmp_path / "cloud", monkeypatch)


@pytest.fixture
def start(tmp_path):
  """Starts the script on a host; what still runs at the end of the test is killed."""
  processes = []

  def start(job, worker=0, **options):
    home = tmp_path / f"home-{worker}"
    launched_host.install(home)
    processes.append(launched_host.start(home, job, worker, **options))
    return processes[-1]

  yield start
  for process in processes:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def run(staging, start, tmp_path):
  """Runs the script with a training that ends with the given statuses; returns what the host left."""

  def run(statuses, *arguments, **more):
    launched_host.pack_program(staging, STATUSES)
    (tmp_path / "statuses").write_text(" ".join(map(str, statuses)))
    return start(job(*arguments, **more)).wait(timeout=60), *left(staging)

  return run


def left(staging, worker=0):
  return (staging / f"host-{worker}.log").read_text(), (staging / f"host-{worker}.state").read_text().split()[:-1]


def test_training_starts_again_after_preemptions_and_the_loss_of_others_alone(run):
  status, log, state = run([143, 42, 134, 137, 0], "--steps", "5")
  assert log.count("training quickstart --steps 5\n") == 5
  assert (status, state) == (0, ["ended", "0"])


@pytest.mark.parametrize("error", [1, 130])
def test_an_error_does_not_loop(run, error):
  status, log, state = run([error, 0])
  assert log.count("training") == 1
  assert (status, state) == (error, ["ended", str(error)])


def test_restarts_on_a_host_are_limited(run):
  status, log, _ = run([143] * 5, max_restarts=2)
  assert (status, log.count("training")) == (143, 3)


def test_aborts_that_come_again_without_progress_end_the_run(run):
  status, log, state = run([134] * 5)
  assert log.count("training") == 3
  assert "Training ended with status 134 three times without progress: no more restarts." in log
  assert (status, state) == (1, ["ended", "1"])


def test_a_machine_that_is_stopped_has_its_run_saved_and_starts_no_other(staging, start, tmp_path):
  launched_host.pack_program(staging, SAVES)
  process = start(job())
  log = tmp_path / "home-0" / "0001.log"
  while not (log.exists() and "trains" in log.read_text()):
    assert process.poll() is None
    time.sleep(0.05)
  process.terminate()
  assert process.wait(timeout=60) == 143
  log, state = left(staging)
  assert log.count("trains") == log.count("saved") == 1
  assert state == ["ended", "143"]


def test_code_that_is_missing_ends_the_run(staging, start):
  process = start(job())
  assert process.wait(timeout=60) == 22
  log, state = left(staging)
  assert "404" in log
  assert state == ["ended", "22"]


def test_a_host_with_an_old_python_gets_a_new_one_by_uv(staging, start, tmp_path):
  launched_host.pack_program(staging, "print('training')")
  assert start(job(), python="no-new-python").wait(timeout=60) == 0
  log, _ = left(staging)
  assert f"uv python install 3.12 in {tmp_path / 'home-0' / 'python'}" in log
  assert "training" in log


def test_hosts_that_jax_does_not_join_find_each_other_by_the_bucket(staging, start):
  launched_host.pack_program(staging, 'import sys\nprint("training", *sys.argv[1:])')
  options = {"join_by_bucket": True, "prepare": "python -c 'print(6 * 7)'"}
  processes = [start(job(topology="v6e:4x4", env=("A=it's",)), worker, **options) for worker in (0, 1)]
  assert [process.wait(timeout=60) for process in processes] == [0, 0]
  for worker in (0, 1):
    log, _ = left(staging, worker)
    assert "42\n" in log
    found = f"--coordinator localhost:8482 --num-processes 4 --process-id {worker}"
    assert f"training quickstart {found}\n" in log


#: A run of one step that starts from random parameters.
TINY = """
import dataclasses

from experiments.configs import quickstart

DEFAULTS = quickstart.Options()


def build(options):
  return dataclasses.replace(quickstart.build(options), start=None)
"""


@pytest.mark.slow
def test_the_script_trains_the_code_of_this_clone(staging, start, tmp_path, monkeypatch):
  """The packed code trains a config with one process on the CPU, to its last step."""
  _script.pack_code(staging / "code.tar.gz")
  (tmp_path / "tiny_config.py").write_text(TINY)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")
  small = dict(
    mode="sync", steps=1, groups=2, samples=2, slots=4, length_buckets=1, rows=4, eval_prompts=0, reward_workers=0
  )
  options = small | {"run_dir": tmp_path / "run"}
  arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
  tiny = dataclasses.replace(job(*arguments), config=str(tmp_path / "tiny_config.py"))
  status = start(tiny).wait(timeout=300)
  log, state = left(staging)
  assert status == 0, log
  assert "Done: 1 optimizer steps." in log
  assert state == ["ended", "0"]
  assert (tmp_path / "run" / "checkpoints" / "1").exists()
