"""The work that every system is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from async_rl.models import ModelConfig
from async_rl.models import named
from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.decode_speed import QWEN3_06B
from experiments.benchmarks.decode_speed import SMOKE

#: SmolLM2-135M's sizes in Qwen3's architecture, which is the one that all systems have.
SMOLLM2_135M = dataclasses.replace(named("smollm2-135m"), qk_norm=True)

PARTS = ("generation", "learning_step")


@dataclasses.dataclass(frozen=True)
class Work:
  """Generation, and one learner step, with random weights of a shape.

  Attributes:
    config: the shape, of Qwen3's architecture with tied embeddings.
    sequences: B, in groups of eight that have the same prompt.
    prompt: P, tokens of a prompt.
    completion: G, tokens of a completion: all are drawn, and all are trained.
    micro_batch: sequences of a micro-batch of the learner step.
    dtype: the dtype of activations and of the sampler's weights, "float32" or "bfloat16"; the learner's weights and its
      optimizer's state are float32.
  """

  config: ModelConfig
  sequences: int
  prompt: int
  completion: int
  micro_batch: int
  dtype: str

  def __post_init__(self):
    for name, divisor in (("sequences", GROUP), ("sequences", self.micro_batch)):
      if divisor < 1 or getattr(self, name) % divisor:
        raise ValueError(f"{name} must be a multiple of {divisor}, got {name}={getattr(self, name)}.")

  def tokens_of(self, part: str) -> int:
    """Returns the tokens that a part makes or reads: those drawn, or those of all sequences, prompts included."""
    return self.sequences * (self.completion + (self.prompt if part == "learning_step" else 0))

  def micro_batches(self) -> list[slice]:
    """Returns the sequences of every micro-batch."""
    return [slice(start, start + self.micro_batch) for start in range(0, self.sequences, self.micro_batch)]

  def prompts(self) -> np.ndarray:
    """Returns random prompts, one per group, int32 [B / 8, P], without token 0, which some systems pad with."""
    shape = self.sequences // GROUP, self.prompt
    return np.random.default_rng(0).integers(1, self.config.vocab_size, shape).astype(np.int32)

  def random_sequences(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns random sequences, int32 [B, P + G], without token 0, and the GRPO advantages of random rewards, [B]."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, self.config.vocab_size, (self.sequences, self.prompt + self.completion)).astype(np.int32)
    rewards = rng.normal(size=(self.sequences // GROUP, GROUP))
    advantages = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)
    return tokens, advantages.reshape(-1).astype(np.float32)

  def check_generated(self, lengths: Sequence[int]) -> None:
    """Raises RuntimeError unless these are the lengths of all completions."""
    if list(lengths) != [self.completion] * self.sequences:
      raise RuntimeError(f"generated {list(lengths)} tokens in place of {self.completion} in each of {self.sequences}")


SHAPES = {
  "tiny": Work(SMOKE, sequences=8, prompt=8, completion=8, micro_batch=4, dtype="float32"),
  "smollm2-135m": Work(SMOLLM2_135M, sequences=8, prompt=32, completion=32, micro_batch=8, dtype="float32"),
  "qwen3-0.6b": Work(QWEN3_06B, sequences=64, prompt=320, completion=256, micro_batch=8, dtype="bfloat16"),
}
