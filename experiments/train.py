"""Runs an experiment: `python -m experiments.train CONFIG [--field value ...]`; `--help` lists them."""

from __future__ import annotations

import sys
import traceback

import tyro

from async_rl.recording import CheckpointError
from async_rl.recording import RunFolderError
from async_rl.runtime import Interrupted
from async_rl.runtime import Summary
from async_rl.runtime import train
from experiments.configs import load_all


def report(summary: Summary) -> str:
  """The last lines of a run: what came out, where it lies, what to do next."""
  lines = [f"\nDone: {summary.version} optimizer steps" + (", the data ended" if summary.ended_early else "") + "."]
  if summary.accuracy is not None:
    lines.append(f"Held-out accuracy: {summary.accuracy_before:.3f} before, {summary.accuracy:.3f} after.")
  folder = summary.folder
  lines += [
    f"Plots       {folder.report}",
    f"Metrics     {folder.metrics}, and: tensorboard --logdir {folder.tensorboard}",
    f"Checkpoint  {folder.checkpoints}, and: python -m experiments.evaluate {folder.path} --samples 8",
    f"Next        go on with --steps {2 * summary.version}, start afresh with --overwrite, "
    f"or try another lag with --max-lag 16 --run-dir {folder.path}-lag16",
  ]
  return "\n".join(lines)


def _is_ours(error: Exception) -> bool:
  """Whether async_rl itself raised `error`, as a sentence for the user, and not what it called."""
  *_, last = traceback.walk_tb(error.__traceback__)
  return last[0].f_globals["__name__"].startswith("async_rl.")


def main(arguments: list[str] | None = None) -> int:
  configs = {name: ((config.__doc__ or "").splitlines()[0], config()) for name, config in load_all().items()}
  experiment = None
  try:
    experiment = tyro.extras.overridable_config_cli(configs, args=arguments, prog="python -m experiments.train")
    print(report(train(experiment)))
  except Interrupted as stop:
    print(stop, file=sys.stderr)
    return stop.status
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
    return 130
  except OSError as error:
    where = f" in {experiment.run_dir}" if experiment and error.filename is None else ""
    remedy = f"{where}; once that is fixed, the same command goes on" if error.errno else ""  # else it is our sentence
    print(f"error: {error}{remedy}", file=sys.stderr)
    return 2
  except (ValueError, ImportError, RunFolderError, CheckpointError, NotImplementedError) as error:
    if not _is_ours(error):
      raise
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
