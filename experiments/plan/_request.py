"""What is to be planned: a run, the devices, and the lengths to expect."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from async_rl import learning
from async_rl import models
from async_rl.runtime import Experiment
from experiments import configs
from experiments.plan._chips import Topology
from experiments.plan._chips import parse_topology
from experiments.plan._shapes import with_model


@dataclasses.dataclass(frozen=True)
class Request:
  """A run to plan.

  Attributes:
    config: the name of the config, or the path of its file.
    options: the values of all its options, by name.
    topology: the accelerators of a slice, such as "v5e:4x4".
    slices: the number of slices.
    hosts: the number of hosts of a slice; `None` for the default.
    model: the public model whose shape replaces the config's weights; `None` keeps these.
    layers: the number of layers to plan with; `None` for the model's own.
    prompt_tokens: the mean length of prompts.
    completion_tokens: the mean length of completions.
    compiled: whether programs are compiled where a compiler is at hand, or only traced.
  """

  config: str
  options: dict[str, Any]
  topology: str
  slices: int = 1
  hosts: int | None = None
  model: str | None = None
  layers: int | None = None
  prompt_tokens: float = 0
  completion_tokens: float = 0
  compiled: bool = True

  def to_json(self) -> str:
    """Returns the text that `from_json` reads."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> Request:
    """Returns the request of a text."""
    values = json.loads(text)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in values["options"].items()}
    return cls(**values | {"options": options})

  @property
  def compiles(self) -> bool:
    """Returns whether programs are compiled."""
    return self.compiled and self.target.has_compiler

  @property
  def target(self) -> Topology:
    """Returns the accelerators."""
    return parse_topology(self.topology, self.slices, self.hosts)

  def experiment(self) -> Experiment:
    """Builds the experiment.

    Raises:
      ValueError: if options contradict each other, there is no such model, or weights are missing and none is named.
    """
    config = configs.load(self.config)
    options = config.options(**self.options)
    try:
      experiment = config.experiment(options if self.model is None else with_model(options, self.model))
    except FileNotFoundError as error:
      raise ValueError(f"{error} To plan without weights, give the name of a shape, as --model qwen3-0.6b.") from error
    policy = experiment.policy
    if self.layers is not None:
      policy = dataclasses.replace(policy, config=dataclasses.replace(policy.config, num_layers=self.layers))
    return dataclasses.replace(experiment, policy=policy)


def micro_batches(experiment: Experiment, mean_tokens: float) -> int:
  """Returns the micro-batches of a step that hold tokens, for sequences of a mean length.

  First-fit packing fills rows to about nine tenths where several sequences share one.
  """
  shape = experiment.batch_shape
  together = max(1.0, 0.9 * shape.row_tokens / mean_tokens) if mean_tokens < 0.9 * shape.row_tokens else 1.0
  return min(shape.capacity, max(1, math.ceil(shape.sequences / together / shape.rows)))


def head_chunks(
  shape: learning.BatchShape, scored: float, devices: int = 1, head_chunk: int = models.HEAD_CHUNK
) -> int:
  """Returns the chunks of tokens for which a device forms logits in a micro-batch, if it scores a share of its tokens.

  Args:
    shape: the shape of the batch.
    scored: the share of tokens that are scored.
    devices: the devices over which rows are split.
    head_chunk: the tokens of a chunk.
  """
  return math.ceil(scored * shape.rows * shape.row_tokens / devices / head_chunk)
