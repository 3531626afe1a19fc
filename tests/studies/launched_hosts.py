"""Runs the start-up script of two hosts on this machine's CPU: they join, one is stopped, both resume to the end.

Command: python tests/studies/launched_hosts.py [--install]
Hardware and time: two CPU cores, two minutes; --install takes five more and the package index.
Result: the lines of both logs, then "two hosts trained 6 steps, stopped and resumed".

The metadata of the machines and the bucket are those of tests/experiments/fake_cloud.py. `--install` installs async_rl
with its extra `train` into each host's folder, as a new machine does; without it, the hosts use this Python's packages.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "experiments")]
STEPS = 6
OPTIONS = dict(
  mode="simulated",
  max_lag=1,
  steps=STEPS,
  groups=4,
  samples=4,
  slots=16,
  rows=8,
  eval_prompts=8,
  checkpoint_every=1,
  warm_accuracy=0.0,
  reward_workers=0,
)


def make_job(folder):
  from experiments.launch._job import Job
  from experiments.launch._topology import Topology

  options = OPTIONS | {"run_dir": folder / "run"}
  arguments = tuple(part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value)))
  return Job("run", "quickstart", arguments, str(folder / "run"), Topology.parse("v5p:2x2x2"), max_restarts=0)


def wait_for_checkpoint(folder, processes):
  while not any((folder / "run" / "checkpoints").glob("[2-9]")):
    assert all(process.poll() is None for process in processes), "a host ended before it was stopped"
    time.sleep(0.2)


def study(folder, install):
  """Starts two hosts, stops one of them after two steps, and starts both again; returns their logs."""
  import launched_host

  from experiments.launch import _script

  with pytest.MonkeyPatch.context() as patch:
    staging = launched_host.make_cloud(folder / "cloud", patch)
    patch.setenv("JAX_PLATFORMS", "cpu")
    patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    _script.pack_code(staging / "code.tar.gz")
    job, homes = make_job(folder), [folder / f"home-{worker}" for worker in (0, 1)]
    for home in homes:
      home.mkdir()
      if not install:
        launched_host.install(home)

    def start():
      return [launched_host.start(home, job, i, join_by_bucket=True) for i, home in enumerate(homes)]

    processes = start()
    try:
      wait_for_checkpoint(folder, processes)
      processes[1].send_signal(signal.SIGTERM)
      stopped = [process.wait(timeout=300) for process in processes]
      assert stopped == [143, 143], stopped
      processes = start()
      assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
      for process in processes:
        if process.poll() is None:
          os.killpg(process.pid, signal.SIGKILL)
    return [(staging / f"host-{worker}.log").read_text() for worker in (0, 1)]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--install", action="store_true", help="install everything, as a new machine does")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="launched-hosts-") as folder:
    logs = study(pathlib.Path(folder), arguments.install)
    for worker, log in enumerate(logs):
      print("\n".join(f"[host-{worker}] {line}" for line in log.splitlines()))
    assert "resumed at step" in logs[0]
    assert f"Done: {STEPS} optimizer steps." in logs[0]
    print(f"two hosts trained {STEPS} steps, stopped and resumed")


if __name__ == "__main__":
  sys.exit(main())
