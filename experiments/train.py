"""Runs an experiment: `python -m experiments.train CONFIG [--option value ...]`; `CONFIG --help` lists the options.

CONFIG is the name of a file in experiments/configs, or the path of a file of the same form.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import tyro

from async_rl.recording import CheckpointError
from async_rl.recording import RunFolderError
from async_rl.runtime import Diverged
from async_rl.runtime import HostError
from async_rl.runtime import Interrupted
from async_rl.runtime import join_hosts
from async_rl.runtime import leave
from async_rl.runtime import train
from experiments import configs
from experiments._outcome import describe_outcome


def _usage() -> str:
  lines = ["usage: python -m experiments.train CONFIG [--option value ...]", "", "configs:"]
  lines += [f"  {name:18}{configs.load(name).description}" for name in configs.NAMES]
  lines += ["", "CONFIG --help lists the options of a config. CONFIG may also be the path of a file of the same form."]
  return "\n".join(lines)


def parse(arguments: list[str]) -> tuple[configs.Config, Any]:
  """Returns the config and the options of a command line.

  Raises:
    ValueError: if there is no such config.
    SystemExit: after help was printed, or an option was refused.
  """
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_usage(), file=sys.stdout if arguments else sys.stderr)
    sys.exit(0 if arguments else 2)
  name, *rest = arguments
  config = configs.load(name)
  flat = (tyro.conf.OmitArgPrefixes,)
  prog, kind = f"python -m experiments.train {name}", type(config.defaults)
  options = tyro.cli(kind, args=rest, default=config.defaults, prog=prog, description=config.description, config=flat)
  return config, options


def _is_ours(error: Exception) -> bool:
  """Returns whether async_rl itself raised `error`, as a sentence for the user, and not what it called."""
  *_, last = traceback.walk_tb(error.__traceback__)
  return last[0].f_globals["__name__"].startswith(("async_rl.", "experiments."))


def main(arguments: list[str] | None = None) -> int:
  run_dir = ""
  arguments = sys.argv[1:] if arguments is None else arguments
  try:
    config, options = parse(arguments)
    run_dir = options.output.run_dir
    with join_hosts(options.devices) as hosts:
      summary = train(config.experiment(options), hosts)
      if hosts.first:
        print(describe_outcome(summary, options, arguments))
  except Interrupted as stop:
    print(stop, file=sys.stderr)
    return stop.status
  except HostError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.status
  except KeyboardInterrupt:
    print("interrupted; rerun the same command to resume from the last checkpoint", file=sys.stderr)
    return 130
  except OSError as error:
    where = f" in {run_dir}" if run_dir and error.filename is None else ""
    remedy = f"{where}; fix this, then rerun the same command to resume" if error.errno else ""  # else ours
    print(f"error: {error}{remedy}", file=sys.stderr)
    return 2
  except (ValueError, ImportError, RunFolderError, CheckpointError, Diverged, NotImplementedError) as error:
    if not _is_ours(error):
      raise
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  leave(main())
