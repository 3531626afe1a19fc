"""One process of several that make one run: `python hosts_program.py SCENARIO PROCESS COUNT PORT FOLDER`.

`runs` joins the other processes and makes one run after another; `all apart` likewise, where half of the processes
learn and the others sample. `signal` is the command line of training, in which process 1 is asked to end by SIGTERM;
`kill` is the same command again, in which process 1 is killed. `kill first` asks for more steps, and process 0 is
killed. In `signal apart` and `kill apart` process 0 learns and process 1 samples.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import runtime_helpers
import sharing
from cheap_lowering import make_lowering_cheap
from jax._src import compiler
from orbax.checkpoint._src.path import atomicity
from tiny import DigitSums
from tiny import tiny

from async_rl import models
from async_rl import runtime
from async_rl import sampling
from async_rl.runtime import _session
from async_rl.runtime import _watch
from experiments import train

HERE = pathlib.Path(__file__).parent
STEPS = 4
#: The environment variable with the folder of the run `killed`, in a bucket; by default it is beside the other runs.
KILLED = "HOSTS_PROGRAM_KILLED"
#: Sizes that all scenarios share, and so most of their programs.
SIZES = dict(decode_chunk=2, max_lag=1)
#: The runs of the scenario `runs`, by name.
RUNS = {
  "whole": dict(mode="simulated", eval_prompts=5, checkpoint_every=1, **SIZES),
  "killed": dict(mode="simulated", eval_prompts=5, checkpoint_every=1, **SIZES),
  "async": dict(mode="async", **SIZES),
  "replay": dict(mode="simulated", **SIZES),
  "colocated": dict(mode="async", generation_devices=0, **SIZES),
  "stages": dict(mode="sync", fsdp=2, reference=True, eval_prompts=5, eval_temperature=None, steps=2),
}

#: Those of the scenario `all apart`, in which half of the processes learn and the others sample. The last one is also
#: made in `runs`, under the name `apart`.
APART = {
  "whole": RUNS["whole"],
  "async": RUNS["async"],
  "replay": RUNS["replay"],
  "stages": RUNS["stages"],
  "adapters": dict(mode="sync", fsdp=2, checkpoint_every=1, steps=2),
  "killed": RUNS["killed"],
}
#: The steps after which runs are killed, to be resumed at once.
KILLED_AT = {"killed": 2, "apart": 2, "adapters": 1}


def start(scenario, folder, count=2, devices=2):
  """Starts the processes of a scenario."""
  program = [str(HERE / "hosts_program.py"), scenario]
  return start_processes(lambda i, port: [*program, str(i), str(count), port, str(folder)], count, devices)


def start_processes(arguments, count, devices, stdout=None):
  """Starts Python processes on so many CPU devices each; `arguments` are those of process i, given a free port."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)]),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
  }
  return [
    subprocess.Popen(
      [sys.executable, *arguments(i, port)], env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    for i in range(count)
  ]


def finish(processes, *statuses, timeout=900):
  """Returns what processes wrote to standard error; fails with it unless they end with these statuses."""
  try:
    errors = [process.communicate(timeout=timeout)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  if (found := tuple(process.returncode for process in processes)) != statuses:
    written = "".join(f"\n\nprocess {i}:\n{text}" for i, text in enumerate(errors))
    raise AssertionError(f"processes ended with {found} instead of {statuses}{written}")
  return errors


def cache_from_every_process():
  """Lets every process write the programs that it compiles to disk, where JAX lets the first one alone."""
  state, write = compiler.distributed.global_state, compiler._cache_write

  def write_as_first(*args):
    process, state.process_id = state.process_id, 0
    try:
      write(*args)
    finally:
      state.process_id = process

  compiler._cache_write = write_as_first


def local_checksum(params):
  """Returns a digest of this process's copy of the parameters; of its shards where they are split over processes."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(params):
    copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
    assert len(copies) <= 1 or not leaf.is_fully_replicated
    for copy in sorted(copies):
      digest.update(copy)
  return digest.hexdigest()


def whole(x):
  """Returns an array of which every process has all parts as one on the host."""
  found = np.zeros(x.shape, x.dtype)
  for shard in x.addressable_shards:
    found[shard.index] = shard.data
  return found


@contextlib.contextmanager
def observed(steps, weights):
  """Notes what this process sees of every step in here, and the checksums of its sampler's weights by version.

  A process that only learns notes the checksums of what the others' samplers should hold.
  """
  learn = _session.Session.step

  def step(self, groups):
    versions = np.concatenate([c.versions[c.mask] for g in groups for c in g.completions])
    seen = {"lag": self.version - int(versions.min()), "tickets": [g.request.ticket for g in groups]}
    learn(self, groups)
    steps.append({"version": self.version, "checksum": local_checksum(self.state.params), **seen})
    weights.update(self._ledger.weights())
    if self._roles.apart and self._roles.learns:
      prepared = jax.jit(functools.partial(sampling.prepare_weights, self.experiment.policy))(self.state.params)
      weights[self.version] = sampling.checksum_weights(jax.tree.map(whole, prepared))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_session.Session, "step", step)
    yield


@contextlib.contextmanager
def damaged_weights(version):
  """The sampler of a run in here gets weights of this version of which one number is wrong in its last bit."""
  give = sampling.Engine.set_weights

  def set_weights(self, params, of_version):
    if of_version == version:
      table = params["ends"]["embed"]
      wrong = np.array(table)
      wrong[3, 5] = np.nextafter(wrong[3, 5], np.float32(np.inf))
      params = {**params, "ends": {**params["ends"], "embed": jax.device_put(wrong, table.sharding)}}
    give(self, params, of_version)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling.Engine, "set_weights", set_weights)
    yield


@contextlib.contextmanager
def slow_folders():
  """The folders of checkpoints are there a while after they were asked for, in here."""
  create = atomicity.AtomicRenameTemporaryPath.create

  async def create_late(self):
    await asyncio.sleep(0.5)
    return await create(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(atomicity.AtomicRenameTemporaryPath, "create", create_late)
    yield


def refusal(experiment, hosts):
  """The message and the exit status with which a run ends."""
  with pytest.raises(runtime.HostError) as error:
    runtime.train(experiment, hosts)
  return [str(error.value), error.value.status]


def make_runs(devices, folder, runs, apart):
  """Makes the runs, and those `apart`, and writes what this process saw of them."""
  results = {"weights": {}}
  task = DigitSums(numbers=2, train=64, test=8, data_dir=str(folder / "data"))
  sharing.share_programs(pytest.MonkeyPatch())
  with runtime.join_hosts(devices) as hosts:
    half = {"generation_hosts": hosts.count // 2}
    for name, options in [*runs.items(), *((name, options | half) for name, options in apart.items())]:
      steps, weights = results[name], results["weights"][name] = [], {}
      if name == "replay":
        options = options | {"lag": str(folder / "async" / "schedule.jsonl")}
      start = runtime.SupervisedStage(steps=2, learning_rate=1e-3, check_every=1) if name == "stages" else None
      run_dir = os.environ.get(KILLED) if name == "killed" else None
      options = {"run_dir": run_dir or str(folder / name), "steps": STEPS, **options}
      experiment = tiny(task=task, start=start, **options)
      if name == "adapters":
        adapted = dataclasses.replace(experiment.policy, lora=models.LoRA(rank=2, alpha=4.0))
        experiment = dataclasses.replace(experiment, policy=adapted)
      with observed(steps, weights), pytest.MonkeyPatch.context() as patch:
        if name != "async":
          sharing.leave_pictures_out(patch)
        if name in KILLED_AT:
          with runtime_helpers.killed_at(KILLED_AT[name]):
            runtime.train(experiment, hosts)
        runtime.train(experiment, hosts)
    if runs:
      make_refused_runs(hosts, folder, task, results)
  (folder / f"results_{devices.process_id}.json").write_text(json.dumps(results))


def make_refused_runs(hosts, folder, task, results):
  """Makes runs that end with an error, and notes how.

  The first of them saves checkpoints of all processes after some of the processes alone have saved others, on slow
  folders.
  """
  steps = results["damaged"] = []
  options = dict(run_dir=str(folder / "damaged"), steps=STEPS, **RUNS["replay"])
  with observed(steps, {}), damaged_weights(2 if hosts.index == 1 else None), slow_folders():
    steps.append(refusal(tiny(task=task, **options), hosts))
  refused = tiny(run_dir=str(folder / "refused"), max_lag=2 + hosts.index, groups=4 * (1 + hosts.index))
  results["refused"] = refusal(refused, hosts)


def signal_in_step(process, number, version):
  """Makes a process send itself a signal when it begins the step from this version."""
  learn = _session.Session.step

  def step(self, groups):
    if self.hosts.index == process and self.version == version:
      os.kill(os.getpid(), number)
    learn(self, groups)

  _session.Session.step = step


def main(scenario, process, count, port, folder):
  given = {"coordinator": f"localhost:{port}", "process_id": int(process), "num_processes": int(count)}
  folder = pathlib.Path(folder)
  make_lowering_cheap()
  cache_from_every_process()
  if scenario == "runs":
    return make_runs(runtime.Devices(**given), folder, RUNS, {"apart": APART["killed"]})
  if scenario == "all apart":
    return make_runs(runtime.Devices(**given), folder, {}, APART)
  apart = scenario.endswith(" apart")
  command = scenario.removesuffix(" apart")
  if command == "kill":
    _watch.LOST_SECONDS = 6.0
  steps, receiver, number, version = {
    "signal": (8, 1, signal.SIGTERM, 2),
    "kill": (8, 1, signal.SIGKILL, 5),
    "kill first": (12, 0, signal.SIGKILL, 10),
  }[command]
  signal_in_step(receiver, number, version)
  options = dict(run_dir=folder / "command", steps=steps, mode="async", checkpoint_every=1, **SIZES, **given)
  if apart:
    options["generation_hosts"] = 1
  config = str(HERE.parent / "tiny.py")
  words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
  runtime.leave(train.main([config, *words]))


if __name__ == "__main__":
  main(*sys.argv[1:])
