"""The speed of whole runs on every sharing of this machine's devices, of either side alone, and of a start.

    python -m experiments.benchmarks.mesh_throughput --gsm8k-folder DIR          # GPUs
    python -m experiments.benchmarks.mesh_throughput --smoke --gsm8k-folder DIR  # any machine, two forced CPU devices

Every run trains a random policy of Qwen3-0.6B's shape in bfloat16 on GSM8K's prompts, 32 groups of 16 samples a step,
in a process of its own; runs on few devices are made side by side on different ones. One token in 62 is a stop token,
so that the lengths have a long tail: 62 tokens in the mean, 512 at most. Prints rows and writes mesh_throughput.json,
by part:

- starts: two starts of one command of a single step, of which the second finds its programs compiled: seconds until the
  step ended.
- runs: seconds of a step, median, mean and slowest; trained tokens per second, and of a step; seconds of a step for
  which the learner computed and the sampler decoded; shares of the time for which the learner and the generator had
  nothing to do; share of the sampler's slots that drew a token; bandwidth of the weight push; the largest lag.
- sampler: by number of devices, the tokens per second of a sampler whose slots are always full.
- ratios, of runs and sampler: for every split what a step would take if the slower side never waited, its tokens at the
  sampler's rate or the learner's seconds in `sync` on as many devices; and what multiple of it the mean step took.
- learner: by number of devices, seconds of a learner's step on as many times the sequences, all axes data or all fsdp.
- long: three steps of a run on one device whose completions all have 16,384 tokens, eight of one prompt. The first
  two compile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from typing import NamedTuple

import jax
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import runtime
from async_rl import stabilizers
from async_rl import tasks
from async_rl.recording import read_metrics
from experiments.benchmarks._run_on_devices import run_on_devices
from experiments.benchmarks.decode_speed import QWEN3_06B
from experiments.benchmarks.stabilizer_cost import make_batch

MEAN_LENGTH = 62
PARTS = ("starts", "runs", "sampler", "learner", "long")
WORDS = ("sync", "async", "colocated", "split")  # of which the name of a run has some
TINY = models.ModelConfig(
  vocab_size=800, d_model=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=64, tie_embeddings=True
)


class Run(NamedTuple):
  """A run: its name, the number of devices, and the options that differ."""

  name: str
  devices: int
  options: tuple[tuple[str, Any], ...]


def sizes_of(count: int) -> list[int]:
  """Returns the numbers of devices that are compared on a machine with `count`."""
  return [size for size in (1, 2, 4, 8) if size <= count]


def runs_of(count: int, lags: Sequence[int], shared_prompts: Sequence[bool]) -> list[Run]:
  """Returns the runs on a machine with `count` devices, those on few devices first."""
  runs = []
  for size in sizes_of(count):
    runs.append(Run("sync", size, (("mode", "sync"),)))
    runs.append(Run("async, colocated, lag 2", size, (("generation_devices", 0), ("max_lag", 2))))
    if size > 1:
      split = ("generation_devices", size // 2)
      runs += [Run(f"async, split, lag {lag}", size, (split, ("max_lag", lag))) for lag in lags]
  return [
    run._replace(name=_name(run.name, shared), options=(*run.options, ("shared_prompts", shared)))
    for run, shared in itertools.product(runs, shared_prompts)
  ]


def _name(run: str, shared_prompts: bool) -> str:
  """Returns the name of a run with or without shared prompts."""
  return f"{run}, shared prompts" if shared_prompts else run


class Machine:
  """The devices of the machine, each lent to one run at a time, in the order of asking."""

  def __init__(self, count: int):
    self._free = list(range(count))
    self._changed = threading.Condition()
    self._turn = threading.Lock()  # of the one who waits: who needs few devices may not overtake who needs many

  @contextlib.contextmanager
  def lend(self, count: int) -> Iterator[list[int]]:
    """Waits until `count` devices are free and lends them."""
    with self._turn, self._changed:
      self._changed.wait_for(lambda: len(self._free) >= count)
      lent, self._free = self._free[:count], self._free[count:]
    try:
      yield lent
    finally:
      with self._changed:
        self._free = sorted(self._free + lent)
        self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class Options:
  training: runtime.Training = runtime.Training(groups=32, samples=16)
  rollout: runtime.Rollout = runtime.Rollout(max_prompt_tokens=384, max_completion_tokens=512, slots=512)
  schedule: runtime.Schedule = runtime.Schedule()
  devices: runtime.Devices = runtime.Devices(rows=16, row_tokens=1024)
  length: runtime.Length = runtime.Length(steps=16)
  output: runtime.Output = runtime.Output(eval_prompts=0, checkpoint_every=0)


SMOKE: dict[str, Any] = dict(
  groups=2, samples=2, slots=4, max_prompt_tokens=720, max_completion_tokens=64, rows=2, row_tokens=784
)
#: What differs in a run of long completions, one to a row.
LONG: dict[str, Any] = dict(
  mode="sync", groups=1, samples=8, slots=8, max_completion_tokens=16_384, rows=1, row_tokens=384 + 16_384
)
SMOKE_LONG: dict[str, Any] = LONG | dict(max_completion_tokens=128, row_tokens=720 + 128)


class LongTailed:
  """A tokenizer in whose vocabulary every 62nd token ends a completion, or none; see `models.Tokenizer`."""

  def __init__(self, corpus: Iterable[str], vocab_size: int, stops: bool = True):
    self._base = models.SentencePieceTokenizer(models.train_sentencepiece(corpus, "bpe", min(vocab_size // 2, 2000)))
    self.vocab_size = vocab_size
    self.pad_id, self.bos_id = self._base.pad_id, self._base.bos_id
    self.stop_ids = tuple(range(self._base.vocab_size, vocab_size, MEAN_LENGTH)) if stops else ()

  def decode(self, ids: Iterable[int]) -> str:
    return self._base.decode([i for i in ids if i < self._base.vocab_size])

  def __getattr__(self, name: str) -> Any:
    return getattr(self._base, name)


def build(folder: str, smoke: bool, stops: bool = True, **options: Any) -> runtime.Experiment:
  """Builds the experiment of a run, of which tokens end completions if *stops*."""
  config = TINY if smoke else QWEN3_06B
  task = tasks.GSM8K(folder=folder, chat=False)
  questions = (pathlib.Path(folder) / "train.jsonl").read_text().splitlines()[:1000]
  return runtime.Experiment(
    name="mesh_throughput",
    options=runtime.override(Options(), **(SMOKE if smoke else {}) | options),
    task=task,
    tokenizer=LongTailed(questions, config.vocab_size, stops),
    policy=make_policy(config, smoke),
    objective=learning.objective("topr", advantages="dr_grpo", aggregate="sequence_mean"),
    optimizer=make_optimizer(),
  )


def make_policy(config: models.ModelConfig, smoke: bool) -> models.Policy:
  return models.Policy(config, dtype="float32" if smoke else "bfloat16", remat="activations")


def make_optimizer() -> optax.GradientTransformation:
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6), stabilizers.scale_by_ess(0.5))


def measure_runs(count: int, args: argparse.Namespace, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of the runs on a machine with `count` devices, as many of them at a time as have devices.

  The row of a run that fails has the message in place of figures.
  """
  machine = Machine(count)

  def train_when_free(number: int, run: Run) -> dict[str, Any]:
    with machine.lend(run.devices) as devices:
      try:
        return train(run, args, folder / str(number), devices)
      except RuntimeError as error:
        return {"run": run.name, "devices": run.devices, "failed": str(error)}

  runs = [run for run in runs_of(count, args.lags, args.shared) if {*args.only} & {*run.name.split(", ")}]
  with futures.ThreadPoolExecutor(count) as pool:
    yield from pool.map(train_when_free, itertools.count(), runs)


def train(run: Run, args: argparse.Namespace, run_dir: pathlib.Path, devices: Sequence[int]) -> dict[str, Any]:
  """Returns the row of a run, made in a process of its own on the devices of these numbers."""
  options = dict(run.options) | {"run_dir": str(run_dir), "steps": args.steps}
  run_on_devices(_command(args, options), devices, run_dir.parent / "cache", forced=args.smoke)
  rows = list(read_metrics(run_dir / "metrics.jsonl"))
  return {"run": run.name, "devices": run.devices, **summarize(rows, dict(run.options).get("max_lag", 0))}


def _command(args: argparse.Namespace, options: dict[str, Any]) -> list[str]:
  """Returns the command of a run."""
  call = f"build({args.gsm8k_folder!r}, {args.smoke}, **{options!r})"
  program = (
    f"from experiments.benchmarks.mesh_throughput import build; from async_rl import runtime; runtime.train({call})"
  )
  return [sys.executable, "-c", program]


def counted_steps(steps: int, max_lag: int) -> range:
  """Returns the steps of a run that count.

  The first third train what was drawn while programs compiled. Nothing is drawn any more in the last ones, as many as
  the bound of the lag.
  """
  return range(steps // 3, steps - max_lag)


def summarize(rows: Sequence[dict[str, Any]], max_lag: int) -> dict[str, float]:
  """Returns the columns of a run with this bound of its lag, of the metrics of the steps that count."""
  steps = [row for row in rows if "reward/mean" in row]
  steps = [steps[i] for i in counted_steps(len(steps), max_lag)]
  times = [row["time/step"] for row in steps]
  mean = lambda name: statistics.mean(row[name] for row in steps)
  pushes = [row["bytes/weight_push"] / row["time/weight_push"] for row in steps if row["time/weight_push"] > 0]
  return {
    "seconds": statistics.median(times),
    "mean": statistics.mean(times),
    "slowest": max(times),
    "tokens/s": sum(row["tokens/trained"] for row in steps) / sum(times),
    "tokens": mean("tokens/trained"),
    "learning": statistics.median(row["time/learning"] for row in steps),
    "generation": mean("time/generation"),
    "idle/learner": mean("idle/learner"),
    "idle/generator": mean("idle/generator"),
    "occupancy": mean("sampler/occupancy"),
    "push GB/s": statistics.median(pushes) / 1e9 if pushes else 0.0,
    "lag": max(row["staleness/max"] for row in steps),
  }


def measure_sampler(count: int, shared: bool, args: argparse.Namespace) -> dict[str, Any]:
  """Returns the tokens per second that the runs' sampler draws on `count` devices when nothing holds it back."""
  experiment = build(args.gsm8k_folder, args.smoke, shared_prompts=shared)
  sampler = experiment.make_sampler(experiment.sampler_config, rollout.make_mesh(jax.devices()[:count]))
  sampler.set_weights(jax.jit(experiment.policy.init)(jax.random.key(0)), 0)
  sampler.warmup()
  prompts = rollout.PromptStream(experiment.encoder, experiment.task.prompts("train"), seed=0)
  tickets = itertools.count()

  def draw(tokens: float) -> float:
    """Draws at least so many tokens; returns how many a second."""
    start, before = time.perf_counter(), sampler.counters.tokens
    while (drawn := sampler.counters.tokens - before) < tokens:
      while sampler.has_room():
        sampler.submit(prompts.request(next(tickets)))
      sampler.step()
    return drawn / (time.perf_counter() - start)

  turn = experiment.sampler_config.slots * MEAN_LENGTH
  draw(2 * turn)  # the samples are of all ages from then on
  rate = draw((1 if args.smoke else 10) * turn)
  return {"devices": count, "shared_prompts": shared, "tokens/s": rate}


def compare(result: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
  """Yields for every run on split devices the seconds of a step if the slower side never waited, and the multiple."""
  rates = {(row["devices"], row["shared_prompts"]): row["tokens/s"] for row in result["sampler"]}
  runs = [row for row in result["runs"] if "failed" not in row]
  learning = {(row["devices"], row["run"]): row["learning"] for row in runs if row["run"].startswith("sync")}
  for row in runs:
    shared = "shared prompts" in row["run"]
    sampler, learner = ((row["devices"] // 2, kind) for kind in (shared, _name("sync", shared)))
    if "split" in row["run"] and sampler in rates and learner in learning:
      sides = {"sampling": row["tokens"] / rates[sampler], "learning": learning[learner]}
      yield {"run": row["run"], "devices": row["devices"], **sides, "ratio": row["mean"] / max(sides.values())}


def measure_starts(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the seconds from a start to the end of the first step on one device, first without compiled programs."""
  for start in ("first", "second"):
    run_dir = folder / start
    options = {"run_dir": str(run_dir), "steps": 1, "generation_devices": 0, "max_lag": 2}
    began = time.time()
    run_on_devices(_command(args, options), [0], folder / "cache", forced=args.smoke)
    yield {"start": start, "seconds": (run_dir / "metrics.jsonl").stat().st_mtime - began}


def measure_learner(count: int, axis: str, smoke: bool) -> dict[str, Any]:
  """Returns the learner's seconds per step of `count` times the sequences on `count` devices."""
  sequences, row_tokens, rows = (8, 32, 2) if smoke else (64, 512, 16)
  half = row_tokens // 2
  shape = learning.BatchShape(sequences * count, row_tokens, rows * count, completion_tokens=half, prompt_tokens=half)
  mesh = rollout.make_mesh(jax.devices()[:count], **({"fsdp": count} if axis == "fsdp" else {}))
  config = TINY if smoke else QWEN3_06B
  objective = learning.objective("topr", advantages="dr_grpo", aggregate="sequence_mean")
  learner = learning.Learner(make_policy(config, smoke), make_optimizer(), objective, shape, mesh)
  state, batch = learner.init(jax.random.key(0)), learner.put(make_batch(shape, config.vocab_size))
  seconds = []
  for _ in range(8):
    start = time.perf_counter()
    state, _ = jax.block_until_ready(learner.step(state, batch))
    seconds.append(time.perf_counter() - start)
  return {"devices": count, "axis": axis, "sequences": shape.sequences, "seconds": statistics.median(seconds[2:])}


def measure_long(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields a row for each step of a run of long completions: its tokens, seconds, and those of its two halves."""
  options = (SMOKE_LONG if args.smoke else LONG) | {"run_dir": str(folder / "run"), "steps": 3, "stops": False}
  run_on_devices(_command(args, options), [0], folder / "cache", forced=args.smoke)
  for row in read_metrics(folder / "run" / "metrics.jsonl"):
    if "reward/mean" in row:
      yield {
        "step": row["step"],
        "seconds": row["time/step"],
        "generation": row["time/generation"],
        "learning": row["time/learning"],
        "tokens": row["tokens/trained"],
        "length": row["response/length_mean"],
      }


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--gsm8k-folder", required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
  parser.add_argument("--steps", type=int, help="of every run; default 28, with --smoke 9")
  parser.add_argument("--lags", type=int, nargs="+", default=(4,), help="bounds of the lag of split devices")
  parser.add_argument("--only", nargs="+", choices=WORDS, default=WORDS, help="kinds of runs to make; all by default")
  parser.add_argument(
    "--shared-prompts",
    dest="shared",
    action="store_const",
    const=(False, True),
    default=(False,),
    help="each run and sampler also with a group's prompt kept and read once",
  )
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mesh_throughput.json"))
  args = parser.parse_args(arguments)
  if args.steps is None:
    args.steps = 9 if args.smoke else 28
  if not counted_steps(args.steps, max(2, *args.lags)):
    parser.error(f"--steps {args.steps} leaves none that count, after its first third and before as many as the lag")
  if not (pathlib.Path(args.gsm8k_folder) / "train.jsonl").exists():
    parser.error(f"--gsm8k-folder {args.gsm8k_folder} has no train.jsonl")
  count = 2 if args.smoke else int(_ask("len(jax.devices())"))
  device = _ask("jax.devices()[0].device_kind")
  result: dict[str, Any] = {"device": device, "devices": count, "jax": jax.__version__}
  result |= {part: [] for part in (*PARTS, "ratios")}

  def report(part: str, rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
      print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
      result[part].append(row)
      args.out.write_text(json.dumps(result, indent=1) + "\n")

  with tempfile.TemporaryDirectory() as name:
    if "starts" in args.parts:
      report("starts", measure_starts(args, pathlib.Path(name) / "starts"))
    if "runs" in args.parts:
      report("runs", measure_runs(count, args, pathlib.Path(name) / "runs"))
    if "long" in args.parts:
      report("long", measure_long(args, pathlib.Path(name) / "long"))
  sizes = sizes_of(min(count, len(jax.devices())))
  if "sampler" in args.parts:
    report("sampler", (measure_sampler(size, shared, args) for size in sizes for shared in args.shared))
  report("ratios", compare(result))
  if "learner" in args.parts:
    cases = [(size, axis) for size in sizes for axis in (("data", "fsdp") if size > 1 else ("data",))]
    report("learner", (measure_learner(size, axis, args.smoke) for size, axis in cases))
  if failed := [row["run"] for row in result["runs"] if "failed" in row]:
    sys.exit(f"These runs failed, with the messages above: {'; '.join(failed)}.")


def _ask(question: str) -> str:
  """Returns what JAX says in a process of its own: this one must not hold the devices while the runs use them."""
  program = f"import jax; print({question})"
  return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
  main()
