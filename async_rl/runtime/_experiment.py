"""What a run is made of: options as fields, parts as methods. A config file is one subclass."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar
from typing import Literal
from typing import get_args

import optax

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.rollout._schedule import LAG_KINDS

if TYPE_CHECKING:
  from async_rl.runtime._parts import Parts

#: Options that may change when a run is resumed: how long, on which devices, and what is written.
_MAY_CHANGE = frozenset(
  {
    "run_dir",
    "steps",
    "eval_every",
    "checkpoint_every",
    "keep",
    "wandb",
    "overwrite",
    "reward_workers",
    "reward_timeout",
  }
  | {"generation_devices", "fsdp", "tensor", "rows", "row_tokens"}
)
Mode = Literal["async", "simulated", "sync"]


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A reinforcement-learning run; subclass it, set the fields and write the methods out.

  Fields are the options of the command line. Methods return real objects (a task, a policy, an optax chain, an
  objective): to change one, override the method. The methods without a body here must be given.
  """

  name: ClassVar[str]

  #: Where the run keeps everything it writes. The same folder with the same options resumes.
  run_dir: str = "runs/experiment"
  #: Seed of initialization, prompt order, sampling and simulated lag.
  seed: int = 0
  #: Optimizer steps in all, also counting those before a resume.
  steps: int = 100
  #: How generation and learning are interleaved: side by side, in turn with a given lag, or in turn without lag.
  mode: Mode = "async"
  #: Passes over the training prompts after which the run ends early; `None`: no limit.
  epochs: int | None = None
  #: Largest lag of a trained token, in optimizer steps. Ignored by "sync", where it is 0.
  max_lag: int = 4
  #: Lag of the "simulated" mode: "fixed", "uniform" or "heavy" (tailed) up to max_lag, "rounds" of max_lag + 1 batches
  #: sampled at a time, or a recorded schedule.jsonl.
  lag: str = "fixed"

  #: Groups (prompts) per optimizer step.
  groups: int = 8
  #: Samples of each group.
  samples: int = 8
  #: Longest prompt, in tokens. Longer ones are an error.
  max_prompt_tokens: int = 512
  #: Longest completion, in tokens; with a tool, all turns and answers together.
  max_completion_tokens: int = 512
  #: Most turns of the model in a completion, for tasks whose tool it may call.
  max_turns: int = 8
  #: Role in which the tool speaks in a conversation; "user" for chat templates that know no "tool".
  tool_role: str = "tool"
  #: Temperature of the softmax, in sampling and in scoring.
  temperature: float = 1.0
  #: Sequences that are decoded at a time.
  slots: int = 64
  #: Tokens decoded between two looks at the host.
  decode_chunk: int = 16
  #: What a weight update does to the keys and values of unfinished sequences.
  on_update: Literal["keep", "recompute"] = "keep"

  #: Devices for generation; the others learn. 0: both share all devices. None: half of them, all if there is one.
  generation_devices: int | None = None
  #: Size of the learner mesh's fsdp axis; what is left of the devices is data parallel.
  fsdp: int = 1
  #: Size of the tensor axis, of both meshes.
  tensor: int = 1
  #: Rows of packed tokens in a micro-batch.
  rows: int = 8
  #: Tokens of a row; 0: longest prompt plus longest completion.
  row_tokens: int = 0

  #: Keep the starting weights as a reference policy to measure the distance to it, even if the objective needs none.
  reference: bool = False

  #: Processes that compute rewards and a tool's answers; 0: in the run's own process, without a time limit.
  reward_workers: int = 2
  #: Seconds that one of them may take.
  reward_timeout: float = 10.0

  #: Optimizer steps between evaluations on held-out prompts; 0: only before and after.
  eval_every: int = 0
  #: Held-out prompts of an evaluation; 0: none.
  eval_prompts: int = 128
  #: Optimizer steps between checkpoints; one is always made at the end.
  checkpoint_every: int = 50
  #: Checkpoints to keep.
  keep: int = 2
  #: Log to Weights & Biases too (needs `wandb`).
  wandb: bool = False
  #: Start afresh in a folder that already holds a run; what it holds is deleted.
  overwrite: bool = False

  def __post_init__(self):
    if self.mode not in get_args(Mode):
      raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got mode={self.mode!r}.")
    sizes = ("steps", "groups", "samples", "max_prompt_tokens", "max_completion_tokens", "decode_chunk", "rows", "keep")
    for field in (*sizes, "max_turns"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1, got {field}={getattr(self, field)}.")
    for field in ("max_lag", "eval_every", "eval_prompts", "checkpoint_every", "reward_workers"):
      if getattr(self, field) < 0:
        raise ValueError(f"{field} must not be negative, got {field}={getattr(self, field)}.")
    if self.epochs is not None and self.epochs < 1:
      raise ValueError(f"epochs must be at least 1, got epochs={self.epochs}; leave it out for no limit.")
    if self.mode == "simulated" and self.lag not in LAG_KINDS and not pathlib.Path(self.lag).is_file():
      raise ValueError(
        f"lag must be one of {', '.join(LAG_KINDS)} or the schedule.jsonl of a run, got lag={self.lag!r}, no such file."
      )
    if not self.temperature > 0:
      raise ValueError(f"temperature must be above 0, got temperature={self.temperature}; training needs samples.")
    if self.mode == "async" and self.generation_devices == 0 and self.max_lag == 0:
      raise ValueError("max_lag=0 on shared devices leaves nothing to overlap; use mode='sync', or raise max_lag.")
    self.batch_shape(), self.sampler_config(), self.objective()  # check the sizes before a folder is made

  # The parts.

  def task(self) -> tasks.Task:
    """Prompts and rewards."""
    raise NotImplementedError

  def tokenizer(self) -> models.Tokenizer:
    """Text to token ids and back; may train one and keep it in `run_dir`."""
    raise NotImplementedError

  def policy(self) -> models.Policy:
    """The architecture; with `lora`, adapters are trained and synced in place of its weights."""
    raise NotImplementedError

  def optimizer(self) -> optax.GradientTransformation:
    """Stabilizers and optimizer, in the order in which they apply."""
    raise NotImplementedError

  def objective(self) -> learning.Objective:
    """Loss, advantages and aggregation."""
    return learning.objective("sequence_tis", advantages="dr_grpo", cap=8.0)

  def scorer(self, parts: Parts) -> tasks.Scorer | None:
    """What rewards training samples, such as a reward model; `None`: the task, which judges evaluations in any case."""
    del parts
    return None

  def start(self, parts: Parts) -> models.Params | None:
    """Parameters to start from, on any device; adapters that they lack are fresh. `None`: random ones."""
    del parts
    return None

  # What follows from the fields.

  def fingerprint(self) -> dict[str, Any]:
    """The options that make two runs the same."""
    options = dataclasses.asdict(self)
    return {"config": self.name, **{name: value for name, value in options.items() if name not in _MAY_CHANGE}}

  @property
  def lag_bound(self) -> int:
    """The lag bound in force."""
    return 0 if self.mode == "sync" else self.max_lag

  @property
  def keeps_reference(self) -> bool:
    """Whether the run has a reference policy."""
    return self.reference or self.objective().needs_reference

  def batch_shape(self) -> learning.BatchShape:
    """Static shape of a training batch."""
    return learning.BatchShape(
      sequences=self.groups * self.samples,
      row_tokens=self.row_tokens or self.max_prompt_tokens + self.max_completion_tokens,
      rows=self.rows,
      completion_tokens=self.max_completion_tokens,
      prompt_tokens=self.max_prompt_tokens,
    )

  def sampler_config(self) -> sampling.SamplerConfig:
    """How training samples are drawn."""
    return sampling.SamplerConfig(
      slots=self.slots,
      group_size=self.samples,
      max_prompt_tokens=self.max_prompt_tokens,
      max_new_tokens=self.max_completion_tokens,
      chunk=self.decode_chunk,
      temperature=self.temperature,
      on_update=self.on_update,
      seed=self.seed,
    )

  def evaluation_config(self) -> sampling.SamplerConfig:
    """How held-out prompts are answered: greedily, one sample each."""
    return dataclasses.replace(self.sampler_config(), group_size=1, temperature=0.0)
