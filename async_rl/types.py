"""The records that travel through the system, and the letters of the dimensions.

Data flows one way::

    Prompt -> Request -> Completion -> Group -> Batch -> TrainState
    (task)   (runtime)  (sampler)     (buffer)  (learner)

Letters used in names and annotations throughout:

    B sequences   T tokens of a row   C completion tokens   V vocabulary   D model width   H query heads
    G groups      K samples of a group (one prompt)         L layers       S allocated cache positions

Host records hold numpy arrays, device records hold `jax.Array`. Both are NamedTuples, hence pytrees, so this
module needs neither JAX nor Flax. A token's *version* is the number of optimizer steps that had made the weights
which drew it; its *lag* is the learner's version minus that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import numpy as np

if TYPE_CHECKING:
  import jax
  import optax

#: A `jax.Array` on the devices, a numpy array on the host.
Array = Any

#: The version written on tokens that no policy drew (prompt and padding); never trained.
NO_VERSION = -1

#: The group of a batch's sequences that belong to none, since their reward failed: no group statistic counts them.
NO_GROUP = int(np.iinfo(np.int32).max)

#: Why a completion ended. `STOP`: it drew a stop token (kept as its last token). `LENGTH`: it hit the token limit, or
#: the next turn of its tool does not fit. `FAILED`: a call of its tool failed; its reward is a stand-in.
STOP = "stop"
LENGTH = "length"
FAILED = "failed"


class Prompt(NamedTuple):
  """One problem of a task, before tokenization.

  Attributes:
    id: stable index in the task's data set, >= 0.
    text: a plain string, or a list of chat messages `{"role": ..., "content": ...}`.
    answer: whatever the task's `reward` needs to judge a completion (picklable).
  """

  id: int
  text: str | list[dict[str, str]]
  answer: Any


class Request(NamedTuple):
  """A tokenized prompt on its way to the sampler, to be completed K times.

  Attributes:
    ticket: the running number of this group, unique in a run and the key of its randomness.
    tokens: prompt token ids, int32 [T], BOS and chat template included.
    prompt: the prompt it was made from.
  """

  ticket: int
  tokens: np.ndarray
  prompt: Prompt


class Completion(NamedTuple):
  """One sample of a group, as the sampler returns it.

  Attributes:
    ticket: the group it belongs to.
    sample: its index in the group, 0 <= sample < K.
    tokens: drawn token ids, int32 [T], the stop token included where there is one.
    logprobs: float32 [T], log-probability of each token under the distribution that drew it.
    versions: int32 [T], version of the weights that drew each token.
    mask: bool [T], False for tokens that were not drawn (tool output): they are context, never trained.
    finish: `STOP`, `LENGTH` or `FAILED`.
  """

  ticket: int
  sample: int
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  mask: np.ndarray
  finish: str


class Group(NamedTuple):
  """A finished and rewarded group: what the rollout buffer holds.

  Attributes:
    request: the prompt as it was submitted.
    completions: the K samples, ordered by `sample`.
    rewards: float32 [K].
    failed: the samples, in ascending order, whose reward or tool failed or timed out. Their rewards are stand-ins, so
      neither their tokens nor their rewards take part in training.
  """

  request: Request
  completions: tuple[Completion, ...]
  rewards: np.ndarray
  failed: tuple[int, ...] = ()


class Batch(NamedTuple):
  """What one optimizer step consumes.

  The *token plane* feeds the policy: sequences (prompt + completion) packed into rows of T tokens, R rows to a
  micro-batch, M micro-batches of which the first `used` hold anything. The *loss plane* feeds the losses: one row
  of C completion tokens per sequence. `index` and `micro` say where each loss-plane token stands in the token
  plane. No sequence is split over rows, so each belongs to exactly one micro-batch.

  Attributes:
    tokens: int32 [M, R, T].
    segments: int32 [M, R, T], number of the sequence within its row from 1 on, 0 on padding. Attention uses this,
      never token ids.
    positions: int32 [M, R, T], position within the sequence.
    used: int32 [], micro-batches that hold tokens.
    index: int32 [B, C], flat position (row * T + column) of each completion token within its micro-batch.
    micro: int32 [B], micro-batch of each sequence.
    mask: bool [B, C], True on the tokens to train (drawn by the policy, in a sample whose reward did not fail).
    logprobs: float32 [B, C], behavior log-probabilities; 0 where `mask` is False.
    versions: int32 [B, C], `NO_VERSION` where `mask` is False.
    rewards: float32 [B].
    groups: int32 [B], index of each sequence's group, 0 <= groups < number of groups, in any order; `NO_GROUP` for a
      sequence whose reward failed.
    truncated: bool [B], True where the completion hit the length limit.
  """

  tokens: Array
  segments: Array
  positions: Array
  used: Array
  index: Array
  micro: Array
  mask: Array
  logprobs: Array
  versions: Array
  rewards: Array
  groups: Array
  truncated: Array


class TrainState(NamedTuple):
  """Everything an optimizer step changes; donated to it.

  Attributes:
    params: the policy's parameters, float32 master weights; beside adapters, what is frozen is in the compute dtype.
    opt_state: state of the optax chain, stabilizers included; of what is trained.
    version: int32 [], optimizer steps taken.
    critic: what is trained beside the policy and never leaves the learner: `{"value_head": ...}`, or `None`.
  """

  params: Any
  opt_state: optax.OptState
  version: jax.Array
  critic: Any = None


Metrics = Mapping[str, float]
