"""Models whose shapes alone are known: a run can be planned before any weights are fetched."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import cast

from async_rl import models
from experiments.configs._pretrained import Pretrained


class _ShapeTokenizer:
  """A tokenizer of which a plan needs the numbers, and which encodes nothing."""

  pad_id = 0
  bos_id = None
  stop_ids = (1,)

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size

  def __getattr__(self, name: str) -> Any:
    raise AttributeError(f"A model of which only the shape is known has no tokenizer that could {name}.")


@dataclasses.dataclass(frozen=True)
class Shape(Pretrained):
  """A public model by name, in the place of pretrained weights."""

  def tokenizer(self) -> models.Tokenizer:
    """Returns the numbers of a tokenizer that has as many tokens as the table has rows."""
    return cast(models.Tokenizer, _ShapeTokenizer(models.named(self.weights).vocab_size))

  def policy(self) -> models.Policy:
    """Returns the architecture."""
    return self._policy(models.named(self.weights))


def with_model(options: Any, name: str) -> Any:
  """Returns the options of a config with a public model's shape in place of its pretrained weights.

  Raises:
    ValueError: if the config has no pretrained weights, or no model has this name.
  """
  pretrained = getattr(options, "pretrained", None)
  if not isinstance(pretrained, Pretrained):
    raise ValueError("*model* replaces pretrained weights, and this config has none; leave it out.")
  models.named(name)
  return dataclasses.replace(options, pretrained=Shape(**vars(pretrained) | {"weights": name}))
