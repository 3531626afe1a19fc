"""Kills runs with SIGKILL at random moments, resumes them, and compares them with undisturbed ones.

Command: python tests/studies/kill.py
Hardware and time: two CPU cores, a few minutes for 15 moments in each of the modes `simulated` and `async`.
Result: one line per run, then "30 of 30 moments lost nothing"; the exit status is 1 otherwise.

A moment is a mark in the timeline of a run (the warm start, the opening, a save, an evaluation, a step) and a part of
the time from there to the next mark. The first moments of each mode hit the warm start, the first and the second save,
evaluations and the opening; the others are drawn. A run is killed five times before it may end.

What must hold: in `simulated` the metrics (but for times) and the final state are those of the undisturbed run, bit for
bit. In `async` each step and each evaluation is written once, no group is trained twice, the lag bound holds, and the
ledger balances. In both, a kill costs no more than the steps since the last save
but two.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

MODES = ("simulated", "async")
STEPS = 8
SAVE_EVERY = 2
MAX_LAG = 2
KILLS_PER_RUN = 5
#: The marks that the first moments of a mode hit, by run.
WANTED = (
  ("start", "save 0", "evaluate 2", "save 4", "step 6"),
  ("evaluate 0", "save 2", "open", "evaluate 6", "save 8"),
)
#: Metrics of these kinds are times, or made of them.
TIMED = ("time/", "idle/", "throughput/")


class Moment(NamedTuple):
  """A moment to kill a process: a mark of its timeline, and seconds after it."""

  mark: str
  delay: float


def make_experiment(folder, mode):
  from tiny import tiny

  from async_rl import runtime

  start = runtime.SupervisedStage(steps=10, learning_rate=2e-3, sequences=8)
  return tiny(
    run_dir=str(folder),
    mode=mode,
    start=start,
    steps=STEPS,
    max_lag=MAX_LAG,
    decode_chunk=2,
    eval_every=SAVE_EVERY,
    eval_prompts=4,
    checkpoint_every=SAVE_EVERY,
  )


def run_and_mark(folder, mode, mark):
  """Runs the experiment to its end and calls `mark` with the name of each part of it that begins."""
  from async_rl import runtime
  from async_rl.runtime import _session

  def marked(method, name):
    def wrapped(self, *arguments, **options):
      mark(name(self))
      return method(self, *arguments, **options)

    return wrapped

  names = {
    "open": lambda session: "open",
    "step": lambda session: f"step {session.version}",
    "evaluate": lambda session: f"evaluate {session.version}",
    "save": lambda session: f"save {session.version}",
  }
  originals = {name: getattr(_session.Session, name) for name in names}
  for name, method in originals.items():
    setattr(_session.Session, name, marked(method, names[name]))
  start = runtime.SupervisedStage.__call__
  runtime.SupervisedStage.__call__ = marked(start, lambda stage: "start")
  try:
    return runtime.train(make_experiment(folder, mode))
  finally:
    runtime.SupervisedStage.__call__ = start
    for name, method in originals.items():
      setattr(_session.Session, name, method)


def run_child(folder, mode):
  """Runs the experiment in this process, which writes its marks to the standard output."""
  run_and_mark(folder, mode, lambda mark: print(f"mark {mark}", flush=True))


@contextlib.contextmanager
def child(folder, mode):
  """Runs the experiment in another process; gives it and an iterator over the marks that it reaches."""
  command = [sys.executable, __file__, "--child", str(folder), "--mode", mode]
  with open(f"{folder}.log", "a") as log:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
      assert process.stdout is not None
      yield process, (line.removeprefix("mark ").strip() for line in process.stdout if line.startswith("mark "))


def kill_at(moment, folder, mode):
  """Runs the experiment in another process and kills it; returns the marks that it reached."""
  marks = []
  with child(folder, mode) as (process, reached):
    for mark in reached:
      marks.append(mark)
      if mark == moment.mark:
        time.sleep(moment.delay)
        break
    process.kill()
  if process.returncode != -signal.SIGKILL:
    raise AssertionError(f"status {process.returncode} before it was killed at {moment}: see {folder}.log")
  return marks


def record_timeline(folder, mode):
  """Runs the experiment undisturbed in another process; returns the marks and their times."""
  with child(folder, mode) as (process, reached):
    timeline = [(mark, time.monotonic()) for mark in reached]
  if process.returncode:
    raise AssertionError(f"the undisturbed run ended with status {process.returncode}: see {folder}.log")
  return [*timeline, ("end", time.monotonic())]


def draw_moments(timeline, count, rng):
  """Returns the moments of the runs of a mode, `count` in all."""
  duration, position = {}, {}
  for i, (mark, at) in enumerate(timeline[:-1]):
    duration[mark], position[mark] = timeline[i + 1][1] - at, i
  runs = [list(marks) for marks in WANTED]
  while len(runs) * KILLS_PER_RUN < count:
    drawn = sorted(rng.sample([mark for mark in position if mark != "open"], KILLS_PER_RUN), key=position.get)
    gaps = [position[b] - position[a] for a, b in itertools.pairwise(drawn)]
    if min(gaps) > 2:  # so that a kill that comes late leaves the next mark ahead
      runs.append(drawn)
  moments = (Moment(mark, rng.random() * duration[mark]) for mark in itertools.chain(*runs))
  moments = list(itertools.islice(moments, count))
  return [moments[i : i + KILLS_PER_RUN] for i in range(0, count, KILLS_PER_RUN)]


def rows_of(folder):
  from async_rl import recording

  return list(recording.read_metrics(folder / "metrics.jsonl"))


def restore(folder, mode):
  """Returns the state and the host's part of the newest checkpoint."""
  import jax

  experiment = make_experiment(folder, mode)
  learner = experiment.make_learner(experiment.make_meshes().learner)
  with contextlib.closing(experiment.make_checkpointer(folder / "checkpoints", read_only=True)) as checkpoints:
    state, (host,) = checkpoints.restore(learner.abstract())
  return jax.device_get(state), host


def check_complete(folder):
  """Each step and each evaluation is written once, and the checkpoints are those of the end."""
  rows = rows_of(folder)
  steps = [row["step"] for row in rows if "reward/mean" in row]
  evaluations = [row["step"] for row in rows if "eval/accuracy" in row]
  assert steps == list(range(1, STEPS + 1)), steps
  assert evaluations == list(range(0, STEPS + 1, SAVE_EVERY)), evaluations
  saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
  assert saved == [str(STEPS - SAVE_EVERY), str(STEPS)], saved


def check_simulated(folder, reference):
  """The metrics and the final state are the undisturbed run's, bit for bit."""
  import jax
  import numpy as np

  for mine, theirs in zip(rows_of(folder), rows_of(reference), strict=True):
    changed = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    assert all(name.startswith(TIMED) for name in changed), (mine["step"], sorted(changed))
  (state, host), (expected, expected_host) = restore(folder, "simulated"), restore(reference, "simulated")
  jax.tree.map(np.testing.assert_array_equal, state, expected)
  assert host["ledger"] == expected_host["ledger"]


def check_async(folder):
  """No group is trained twice, every token is accounted for, and the lag bound holds."""
  from async_rl import rollout

  schedule = list(rollout.read_schedule(folder / "schedule.jsonl"))
  trained = [ticket for event in schedule if event[0] == "train" for ticket in event[2]]
  groups = make_experiment(folder, "async").options.training.groups
  assert [event[1] for event in schedule if event[0] == "train"] == list(range(STEPS))
  assert len(trained) == len(set(trained)) == STEPS * groups, collections.Counter(trained).most_common(3)
  rows = [row for row in rows_of(folder) if "reward/mean" in row]
  assert max(row["staleness/max"] for row in rows) <= MAX_LAG
  _, host = restore(folder, "async")
  ledger = host["ledger"]
  assert ledger["ended"]["trained"] == sum(row["tokens/trained"] for row in rows), ledger
  assert ledger["ended"]["stale"] == 0
  assert ledger["generated"] >= sum(ledger["ended"].values()), ledger  # the rest is saved, as each save checked


def check_kill(folder, marks):
  """All saves that began before the kill are on disk, but for the last one, and the one that it had to wait for."""
  begun = [int(mark.split()[1]) for mark in marks if mark.startswith("save ")]
  saved = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
  assert len(begun) < 3 or max(saved) >= begun[-3], (begun, saved)


def study(mode, count, rng, folder):
  """Kills runs of a mode at `count` moments; returns the number of those that lost nothing."""
  reference = folder / mode
  record_timeline(reference, mode)
  check_complete(reference)
  timeline = record_timeline(folder / f"{mode}-timed", mode)  # nothing is compiled any more
  good = 0
  for number, moments in enumerate(draw_moments(timeline, count, rng)):
    killed = folder / f"{mode}-{number}"
    try:
      for moment in moments:
        check_kill(killed, kill_at(moment, killed, mode))
      run_and_mark(killed, mode, lambda mark: None)
      check_complete(killed)
      check_simulated(killed, reference) if mode == "simulated" else check_async(killed)
      outcome = "nothing lost"
      good += len(moments)
    except Exception as error:
      outcome = f"FAILED: {type(error).__name__}: {error}"
    places = ", ".join(f"{moment.mark} + {moment.delay:.3f} s" for moment in moments)
    print(f"{mode}: killed at {places}: {outcome}", flush=True)
  return good


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--moments", type=int, default=15, help="kills in each mode")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path, help="where the runs are kept; by default they are deleted")
  parser.add_argument("--mode", choices=MODES, help="only this mode")
  parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  with contextlib.ExitStack() as stack:
    folder = arguments.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kill-")))
    folder.mkdir(parents=True, exist_ok=True)
    cache = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / "programs"))
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    if arguments.child:
      return run_child(arguments.child, arguments.mode)
    pathlib.Path(cache).mkdir(parents=True, exist_ok=True)
    start, rng = time.monotonic(), random.Random(arguments.seed)
    modes = [arguments.mode] if arguments.mode else MODES
    good = sum(study(mode, arguments.moments, rng, folder) for mode in modes)
    result = {"moments": arguments.moments * len(modes), "lost_nothing": good, "seed": arguments.seed}
    print(json.dumps(result | {"seconds": round(time.monotonic() - start)}))
    print(f"{good} of {result['moments']} moments lost nothing")
  return int(good < result["moments"])


if __name__ == "__main__":
  sys.exit(main())
