"""Launches, lists and deletes runs on Cloud TPUs; `python -m experiments.launch --help`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import tyro

from async_rl._suggestions import suggestion
from async_rl.runtime import flatten
from experiments import configs
from experiments.launch import _drive
from experiments.launch import _gce
from experiments.launch import _jobset
from experiments.launch import _pods
from experiments.launch import _queued
from experiments.launch import _tpu_vm
from experiments.launch import _xpk
from experiments.launch._check_plan import check_plan
from experiments.launch._check_plan import plan_command
from experiments.launch._commands import CommandError
from experiments.launch._commands import run
from experiments.launch._commands import run_unless_missing
from experiments.launch._drive import LaunchError
from experiments.launch._job import Job
from experiments.launch._job import make_name
from experiments.launch._machines import Place
from experiments.launch._machines import Zone
from experiments.launch._pods import Cluster
from experiments.launch._pods import Image
from experiments.launch._script import ROOT
from experiments.launch._topology import Topology

_MACHINES: dict[str, Any] = {"tpu-vm": _tpu_vm, "queued": _queued, "gce": _gce}
_BACK_ENDS: dict[str, Any] = {
  "tpu-vm": _tpu_vm.TpuVm,
  "queued": _queued.Queued,
  "gce": _gce.ComputeEngine,
  "xpk": _xpk.Xpk,
  "jobset": _jobset.JobSet,
}
_PODS: dict[str, Any] = {"xpk": _xpk, "jobset": _jobset}
_LIST = "Lists the runs that were launched."
_DELETE = "Deletes the machines of a run; its folder stays."
_FLAT = (tyro.conf.OmitArgPrefixes,)
_USAGE = """\
usage: python -m experiments.launch BACK_END CONFIG --topology v5e:4x4 --run-dir gs://BUCKET/PATH ...
       python -m experiments.launch list BACK_END ...
       python -m experiments.launch delete BACK_END NAME ...

back ends:
  tpu-vm   one slice of the Cloud TPU API (v5e, v5p, v6e), there within minutes or not at all
  queued   one slice or several of the Cloud TPU API, which come when they are free
  gce      one slice of Compute Engine (v5p, v6e, tpu7x; v5e of one host)
  xpk      one slice or several on a cluster made by xpk
  jobset   one slice or several on any GKE cluster with JobSet

Each with --help lists its options. CONFIG and its options are those of experiments.train; --dry-run prints what would
be run. The same command follows a run that goes on, and resumes one that has ended.
"""


@dataclasses.dataclass(frozen=True)
class Launch:
  """A run on TPUs."""

  #: Slice in JAX's words: generation and chips in each direction, such as v5e:4x4, v6e:2x4 or v5p:2x2x2.
  topology: str
  #: Number of such slices.
  slices: int = 1
  #: Name of what is created; None: the last part of the run's folder.
  name: str | None = None
  #: Take machines that may be preempted, for less money; the run resumes on others.
  spot: bool = False
  #: Restarts after preemptions and lost hosts; an error in the run ends it at once.
  max_restarts: int = 50
  #: Environment variables of the run, each NAME=VALUE; they can be read in the cloud's console, so no secrets.
  env: tuple[str, ...] = ()
  #: Compile the run for the slices first, and refuse what does not fit (see experiments.plan).
  plan: bool = True
  #: More options of experiments.plan, as one text: --plan-flags="--model qwen3-0.6b --depths 2 4"
  plan_flags: str = ""
  #: Print all that would be run, and stop.
  dry_run: bool = False


def parse(back_end: str, arguments: list[str]) -> tuple[Launch, Any]:
  """Returns the options of a launch, and the `Machines` or `Pods` of its run.

  Raises:
    ValueError: if there is no such config, or the run cannot be launched like this.
    SystemExit: after help was printed, or an option was refused.
  """
  prog = f"python -m experiments.launch {back_end}"
  own_parts = (Launch, Place if back_end in _MACHINES else Image)
  own = dataclasses.make_dataclass("Own", zip(("launch", "place"), own_parts))
  if not arguments or arguments[0].startswith("-"):
    more = "The options of CONFIG come on top: CONFIG --help lists all."
    tyro.cli(own, args=["--help"], prog=f"{prog} CONFIG", description=more, config=_FLAT)
  config, rest = configs.load(arguments[0]), arguments[1:]
  options = ("options", type(config.defaults), config.defaults)
  _check_names(config, own_parts)
  everything = dataclasses.make_dataclass("Everything", [options], bases=(own,))
  prog = f"{prog} {arguments[0]}"
  given: Any = tyro.cli(everything, args=rest, prog=prog, description=config.description, config=_FLAT)
  _, others = tyro.cli(own, args=rest, config=_FLAT, return_unknown_args=True)
  job = Job(
    name=given.launch.name or make_name(given.options.output.run_dir),
    config=_path_in_code(arguments[0]),
    arguments=tuple(others),
    run_dir=given.options.output.run_dir,
    topology=Topology.parse(given.launch.topology),
    slices=given.launch.slices,
    spot=given.launch.spot,
    max_restarts=given.launch.max_restarts,
    env=given.launch.env,
  )
  return given.launch, _BACK_ENDS[back_end](job, given.place)


def _check_names(config: configs.Config, parts: tuple[type, ...]) -> None:
  """Refuses a config with an option that a launch has, too."""
  taken = {field.name for part in parts for field in dataclasses.fields(part)}
  if twice := sorted(taken & flatten(config.defaults).keys()):
    raise ValueError(f"{config.name} has options that launching has, too: rename {', '.join(twice)}.")


def _path_in_code(config: str) -> str:
  """Returns the name of a config as the hosts know it: the path of a file below the root of the code."""
  if not config.endswith(".py"):
    return config
  path = pathlib.Path(config).expanduser().resolve()
  if not path.is_relative_to(ROOT / "experiments"):
    raise ValueError(f"{config} must lie below {ROOT / 'experiments'}: the hosts get nothing else.")
  return str(path.relative_to(ROOT))


def launch(back_end: str, arguments: list[str]) -> int:
  """Launches a run, or prints what that would run; returns the exit status."""
  options, target = parse(back_end, arguments)
  plan = plan_command(target.job, options.plan_flags) if options.plan else None
  folder = pathlib.Path("runs", "launch", target.job.name)
  if options.dry_run:
    on_machines = back_end in _MACHINES
    print(_drive.describe_launch(target, folder, plan) if on_machines else _pods.describe_launch(target, plan))
    return 0
  if plan is not None:
    check_plan(plan)
  try:
    return _drive.Drive(target, folder)() if back_end in _MACHINES else _pods.run_on_cluster(target)
  except KeyboardInterrupt:
    unfollowed = ", but not on new machines after a preemption" if back_end in _MACHINES else ""
    delete = f"`python -m experiments.launch delete {back_end} {target.job.name} ...`"
    print(f"\nThe run goes on{unfollowed}. The same command follows it, {delete} ends it.", file=sys.stderr)
    return 130


def list_runs(back_end: str, arguments: list[str]) -> int:
  """Prints the runs of a back end."""
  prog = f"python -m experiments.launch list {back_end}"
  place: Any = tyro.cli(Zone if back_end in _MACHINES else Cluster, args=arguments, prog=prog, description=_LIST)
  module = _MACHINES.get(back_end, _pods)
  if back_end not in _MACHINES:
    run(place.connect)
  rows = module.read_list(json.loads(run(module.list_command(place))))
  for row in [("name", "kind", "state"), *rows]:
    print("  ".join(f"{text:28}" for text in row).rstrip())
  return 0


def delete_run(back_end: str, arguments: list[str]) -> int:
  """Deletes the machines or pods of a run; its folder stays."""
  prog = f"python -m experiments.launch delete {back_end}"
  if not arguments or arguments[0].startswith("-"):
    arguments = ["NAME", "--help"]
  name, *rest = arguments
  if back_end in _MACHINES:
    zone = tyro.cli(Zone, args=rest, prog=f"{prog} {name}", description=_DELETE)
    commands = _MACHINES[back_end].delete_commands(name, zone)
  else:
    cluster = tyro.cli(Cluster, args=rest, prog=f"{prog} {name}", description=_DELETE)
    commands = [cluster.connect, _PODS[back_end].delete_command(name, cluster)]
  found = sum(run_unless_missing(command) for command in commands)
  print(f"{name} is deleted." if found else f"There is no {name}.")
  return 0


def main(arguments: list[str] | None = None) -> int:
  arguments = sys.argv[1:] if arguments is None else arguments
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_USAGE, file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else 2
  action = {"list": list_runs, "delete": delete_run}.get(arguments[0], launch)
  back_end, *rest = arguments[action is not launch :] or [""]
  try:
    if back_end not in _BACK_ENDS:
      raise ValueError(f"unknown back end {back_end!r}: {suggestion(back_end, _BACK_ENDS)}")
    return action(back_end, rest)
  except (ValueError, CommandError, LaunchError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
