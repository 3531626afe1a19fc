"""The smallest experiment that has every part: sums of two numbers, one layer, seconds on a CPU."""

import dataclasses
import functools
import pathlib

import optax

from async_rl import learning
from async_rl import models
from async_rl import runtime
from async_rl import stabilizers
from async_rl import tasks

OBJECTIVE = learning.objective("sequence_tis")


@dataclasses.dataclass(frozen=True)
class DigitSums(tasks.Sums):
  """Rewards the share of digits, so that a random policy already has something to learn."""

  def reward(self, prompt, text, finish):
    return sum(c.isdigit() for c in text) / 16


@dataclasses.dataclass(frozen=True)
class Options:
  """Options for seconds-long runs; rewards are computed in process."""

  learning_rate: float = 1e-2
  train_prompts: int = 64
  training: runtime.Training = runtime.Training(groups=4, samples=2)
  rollout: runtime.Rollout = runtime.Rollout(
    max_prompt_tokens=8, max_completion_tokens=16, slots=8, decode_chunk=4, length_buckets=1
  )
  schedule: runtime.Schedule = runtime.Schedule(mode="simulated", max_lag=2)
  devices: runtime.Devices = runtime.Devices(reward_workers=0)
  length: runtime.Length = runtime.Length(steps=6)
  output: runtime.Output = runtime.Output(eval_prompts=0, checkpoint_every=0)


def build(options):
  """Returns the experiment with these options."""
  task = sums(options)
  config = models.ModelConfig(vocab_size=24, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32)
  return runtime.Experiment(
    name="tiny",
    options=options,
    task=task,
    tokenizer=make_tokenizer(task.corpus),
    policy=models.Policy(config, dtype="float32"),
    objective=OBJECTIVE,
    optimizer=make_optimizer(options.learning_rate),
  )


@functools.cache
def make_tokenizer(corpus):
  """Returns the tokenizer of all texts in these characters."""
  return models.SentencePieceTokenizer(models.train_sentencepiece([corpus]))


@functools.cache
def make_optimizer(learning_rate):
  """Returns Adam with every stabilizer; the same object for the same rate, so that programs can be shared."""
  adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate), stabilizers.scale_by_ess())
  return stabilizers.control_alignment(adam)


def sums(options, kind=DigitSums, **fields):
  """Returns a task of sums, with its data beside the run."""
  folder = pathlib.Path(options.output.run_dir).parent / "data"
  return kind(numbers=2, train=options.train_prompts, test=8, data_dir=str(folder), **fields)


def tiny(options=Options(), build=build, **given):
  """Returns the experiment with some options replaced by name, and some of its objects, such as `task` or `start`."""
  objects = {field.name for field in dataclasses.fields(runtime.Experiment)} & set(given)
  options = runtime.override(options, **{name: value for name, value in given.items() if name not in objects})
  return dataclasses.replace(build(options), **{name: given[name] for name in objects})
