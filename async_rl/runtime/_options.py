"""The options of a run, in parts; each part checks its own values, in the words of the command line.

The options of a config are a frozen dataclass of these parts, with the config's defaults, and of the few options that
its users turn. `override` sets options by their names alone, whatever part they sit in.
"""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import Literal
from typing import Protocol
from typing import TypeVar
from typing import Union
from typing import get_args
from typing import get_origin
from typing import get_type_hints

from async_rl._paths import as_path
from async_rl._paths import check_path
from async_rl._suggestions import suggestion
from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.learning._norms import ExactNorms
from async_rl.rollout._schedule import LAG_KINDS
from async_rl.tasks._reward_pool import MAX_TIMEOUT_S

Mode = Literal["async", "simulated", "sync"]
OnUpdate = Literal["keep", "recompute"]
T = TypeVar("T")
#: The smallest temperature at which float32 log-probabilities still mean something.
MIN_TEMPERATURE = 1e-3


@dataclasses.dataclass(frozen=True)
class Training:
  """The data of an optimizer step."""

  #: Seed of initialization, prompt order, sampling and simulated lag.
  seed: int = 0
  #: Groups (prompts) per optimizer step.
  groups: int = 8
  #: Samples of each group.
  samples: int = 8
  #: Passes over the training prompts after which the run ends early; None: no limit.
  epochs: int | None = None
  #: Keep the starting weights as a reference policy to measure the distance to it, even if the objective needs none.
  reference: bool = False
  #: Folder of a run from whose newest checkpoint to take the first parameters, in place of the config's own start; the
  #: optimizer is new.
  init_from: str | None = None

  def __post_init__(self):
    check_number("seed", self.seed, whole=True, at_least=0, below=2**32)
    check_number("groups", self.groups, whole=True, at_least=1)
    check_number("samples", self.samples, whole=True, at_least=1)
    if self.epochs is not None:
      check_number("epochs", self.epochs, whole=True, at_least=1, remedy="leave it out for no limit")
    if self.init_from is not None:
      check_path("init_from", self.init_from)
    if self.init_from == "":
      raise ValueError(
        "*init_from* must name the folder of a run, got init_from=''; leave it out to start without one."
      )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The limits of a rollout, and how the sampler draws it."""

  #: Longest prompt, in tokens. Longer ones are an error, unless they are skipped.
  max_prompt_tokens: int = 512
  #: Leave out, and count, prompts that are too long or otherwise of no use, instead of refusing to start.
  skip_bad_prompts: bool = False
  #: Longest completion, in tokens; with a tool, all turns and answers together.
  max_completion_tokens: int = 512
  #: Maximum number of model turns per completion, for tasks with a tool.
  max_turns: int = 8
  #: Role in which the tool speaks in a conversation; "user" for chat templates without a "tool".
  tool_role: str = "tool"
  #: Temperature of the softmax, in sampling and in scoring.
  temperature: float = 1.0
  #: Sequences decoded at the same time.
  slots: int = 64
  #: Decode steps per chunk; the host regains control only between chunks.
  decode_chunk: int = 16
  #: Treatment of the cached keys and values of unfinished sequences when the weights change.
  on_update: OnUpdate = "keep"
  #: Tokens, padding included, that one prefill call should process.
  prefill_tokens: int = 1024
  #: Number of lengths for which the sampler's programs are compiled.
  length_buckets: int = 2
  #: Number of sizes, each a quarter of the next, between which the sampler's cache follows the live sequences.
  slot_buckets: int = 3
  #: Keep the keys and values of a prompt once for the samples of its group, and read them once in a decode step: less
  #: memory, and on GPUs more speed while most slots are live. Not with the kernel of attention="ragged" (auto on TPUs).
  shared_prompts: bool = False

  def __post_init__(self):
    sizes = ("max_prompt_tokens", "max_completion_tokens", "max_turns", "slots", "decode_chunk", "prefill_tokens")
    for name in (*sizes, "length_buckets", "slot_buckets"):
      check_number(name, getattr(self, name), whole=True, at_least=1)
    check_number("temperature", self.temperature, at_least=MIN_TEMPERATURE, remedy="training needs samples")
    check_choice("on_update", self.on_update, get_args(OnUpdate))


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The interleaving of generation and learning, and the lag that it leads to."""

  #: Generation and learning side by side (async), in turn with a given lag (simulated), or in turn without lag (sync).
  mode: Mode = "async"
  #: Largest lag of a trained token, in optimizer steps. Ignored by "sync", where it is 0.
  max_lag: int = 4
  #: Lag of the "simulated" mode: "fixed", "uniform" or "heavy" (tailed) up to max_lag, "rounds" of max_lag + 1 batches
  #: sampled at a time, or a recorded schedule.jsonl.
  lag: str = "fixed"

  def __post_init__(self):
    check_choice("mode", self.mode, get_args(Mode))
    check_number("max_lag", self.max_lag, whole=True, at_least=0)
    if self.lag not in LAG_KINDS and not as_path(self.lag, "lag").is_file():
      raise ValueError(
        f"*lag* must be one of {', '.join(LAG_KINDS)} or the schedule.jsonl of a run, got lag={self.lag!r}, "
        "which is no file."
      )

  @property
  def lag_bound(self) -> int:
    """Returns the lag bound in force."""
    return 0 if self.mode == "sync" else self.max_lag

  @property
  def replays(self) -> bool:
    """Returns whether the run repeats a recorded schedule, which fixes its lags and its end."""
    return self.mode == "simulated" and self.lag not in LAG_KINDS


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices and processes that do the work; may change when a run is resumed."""

  #: Devices for generation; the others learn. 0: both share all devices. None: half of them, all if there is one.
  generation_devices: int | None = None
  #: Hosts that only generate, the last ones; the others only learn. 0: every host does both. None: what compiles.
  generation_hosts: int | None = None
  #: Size of the learner mesh's fsdp axis; the remaining devices are data parallel.
  fsdp: int = 1
  #: Size of the learner mesh's tensor axis.
  tensor: int = 1
  #: Size of the generation meshes' tensor axis; their other devices are data parallel. None: the same as tensor.
  generation_tensor: int | None = None
  #: Rows of packed tokens in a micro-batch.
  rows: int = 8
  #: Tokens of a row; 0: longest prompt plus longest completion.
  row_tokens: int = 0
  #: The most sequences of a row; the lower, the faster is attention on GPUs, the higher, the fuller are rows of many
  #: short sequences. 0: any number.
  row_sequences: int = 8
  #: How exact OPOB (--advantages opob) computes gradient norms. packed: of all sequences of a micro-batch in one pass;
  #: single: of one sequence at a time; auto: what takes fewer operations, which is packed but for long sequences.
  exact_norms: ExactNorms = "auto"
  #: Keep compiled programs for later starts: in $JAX_COMPILATION_CACHE_DIR, by default ~/.cache/async_rl/programs.
  compilation_cache: bool = True
  #: Processes that compute rewards and a tool's answers; 0: in the run's own process, without a time limit.
  reward_workers: int = 2
  #: Seconds that one of their calls may take.
  reward_timeout: float = 10.0
  #: Host and port of process 0 of a run on several hosts, where the environment does not tell (as on TPUs).
  coordinator: str | None = None
  #: Number of this process in such a run, from 0 on.
  process_id: int | None = None
  #: Number of processes of such a run.
  num_processes: int | None = None

  def __post_init__(self):
    for name in ("fsdp", "tensor", "rows"):
      check_number(name, getattr(self, name), whole=True, at_least=1)
    for name in ("row_tokens", "row_sequences", "reward_workers"):
      check_number(name, getattr(self, name), whole=True, at_least=0)
    if self.generation_tensor is not None:
      check_number("generation_tensor", self.generation_tensor, whole=True, at_least=1)
    for name in ("generation_devices", "generation_hosts"):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), whole=True, at_least=0)
    if self.generation_hosts and self.generation_devices is not None:
      raise ValueError(
        f"*generation_hosts* generate on all of their devices, got generation_hosts={self.generation_hosts} and "
        f"generation_devices={self.generation_devices}; give one of them."
      )
    check_number("reward_timeout", self.reward_timeout, above=0, at_most=MAX_TIMEOUT_S)
    check_choice("exact_norms", self.exact_norms, get_args(ExactNorms))
    self._check_processes()

  def _check_processes(self) -> None:
    given = (self.coordinator, self.process_id, self.num_processes)
    if None in given and given != (None, None, None):
      raise ValueError(
        f"*coordinator*, *process_id* and *num_processes* must be given together, got coordinator={self.coordinator}, "
        f"process_id={self.process_id}, num_processes={self.num_processes}."
      )
    if self.num_processes is not None:
      check_number("num_processes", self.num_processes, whole=True, at_least=1)
      check_number("process_id", self.process_id, whole=True, at_least=0, below=self.num_processes)
    if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
      raise ValueError(f"*coordinator* must be host:port, got coordinator={self.coordinator!r}.")


@dataclasses.dataclass(frozen=True)
class Length:
  """The length of a run; may change when it is resumed."""

  #: Optimizer steps in all, also counting those before a resume.
  steps: int = 100

  def __post_init__(self):
    check_number("steps", self.steps, whole=True, at_least=1)


@dataclasses.dataclass(frozen=True)
class Output:
  """Evaluations, and everything that a run writes; may change when it is resumed."""

  #: Folder of everything the run writes, also gs://bucket/folder. The same folder with the same options resumes.
  run_dir: str = "runs/experiment"
  #: Optimizer steps between evaluations on held-out prompts; 0: only before and after.
  eval_every: int = 0
  #: Held-out prompts of an evaluation; 0: none.
  eval_prompts: int = 128
  #: Temperature of evaluations; 0 is greedy, None the temperature of training samples.
  eval_temperature: float | None = 0.0
  #: Optimizer steps between checkpoints; one is always made at the end.
  checkpoint_every: int = 50
  #: Checkpoints to keep.
  keep: int = 2
  #: Log to Weights & Biases too (needs `wandb`).
  wandb: bool = False
  #: Draw the curves to report.png at the end.
  picture: bool = True
  #: Start over in a folder that already holds a run, which is deleted.
  overwrite: bool = False

  def __post_init__(self):
    if not self.run_dir.strip() or not self.run_dir.isprintable():
      raise ValueError(f"*run_dir* must name a folder, in printable characters, got run_dir={self.run_dir!r}.")
    check_path("run_dir", self.run_dir)
    for name in ("eval_every", "eval_prompts", "checkpoint_every"):
      check_number(name, getattr(self, name), whole=True, at_least=0)
    if self.eval_temperature not in (None, 0):
      check_number("eval_temperature", self.eval_temperature, at_least=MIN_TEMPERATURE, remedy="0 is greedy")
    check_number("keep", self.keep, whole=True, at_least=1)


#: Options that name a process among those of a run; they say nothing of the run itself.
PROCESS_OPTIONS = ("coordinator", "process_id", "num_processes")
#: Parts whose values may change when a run is resumed.
RESUMABLE = (Devices, Length, Output)


class Options(Protocol):
  """The options of a config: a frozen dataclass with at least these parts."""

  @property
  def training(self) -> Training:
    """Returns the data of an optimizer step."""

  @property
  def rollout(self) -> Rollout:
    """Returns the limits of a rollout."""

  @property
  def schedule(self) -> Schedule:
    """Returns the interleaving of generation and learning."""

  @property
  def devices(self) -> Devices:
    """Returns the devices and processes."""

  @property
  def length(self) -> Length:
    """Returns the length of the run."""

  @property
  def output(self) -> Output:
    """Returns the evaluations and what is written."""


def flatten(options: Any, skip: tuple[type, ...] = ()) -> dict[str, Any]:
  """Returns the values of a dataclass of options and of its parts by name, without the parts of the types in `skip`."""
  return {name: value for part, name, value in _leaves(options) if not isinstance(part, skip)}


def override(options: T, **values: Any) -> T:
  """Returns `options` with some values replaced, each in the part that has it.

  Args:
    options: a frozen dataclass, perhaps with such dataclasses as parts.
    **values: the new values by name, such as `max_lag=3`.

  Raises:
    ValueError: if no part has such a name, or a part refuses a value.
  """
  types_by_name = {name: get_type_hints(type(part))[name] for part, name, _ in _leaves(options)}
  for name, value in values.items():
    if name not in types_by_name:
      raise ValueError(f"unknown option {name!r}: {suggestion(name, types_by_name)}")
    if types_by_name[name] in (bool, str):  # parts rely on these types and check numbers themselves
      _check_type(name, value, types_by_name[name])
  return _replace(options, values)


def check_types(options: Any) -> None:
  """Raises a ValueError if an option is of another type than its part declares, such as `overwrite="false"`."""
  for part, name, value in _leaves(options):
    _check_type(name, value, get_type_hints(type(part))[name])


#: Types whose values are checked, in words.
_WORDS: Mapping[Any, str] = {
  bool: "True or False",
  int: "an integer",
  float: "a number",
  str: "a text",
  type(None): "None",
}


def _check_type(name: str, value: Any, hint: Any) -> None:
  """Checks values of the types in `_WORDS` and of their unions; the command line checks the others."""
  kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
  if not set(kinds) <= set(_WORDS):
    return
  accepted = tuple({int: numbers.Integral, float: numbers.Real}.get(kind, kind) for kind in kinds)
  if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
    raise ValueError(f"*{name}* must be {' or '.join(_WORDS[kind] for kind in kinds)}, got {name}={value!r}.")


def _leaves(options: Any) -> Iterator[tuple[Any, str, Any]]:
  """Yields the part, the name and the value of every option."""
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if dataclasses.is_dataclass(value):
      yield from _leaves(value)
    else:
      yield options, field.name, value


def _replace(options: T, values: dict[str, Any]) -> T:
  changed = {}
  for field in dataclasses.fields(options):  # type: ignore[arg-type]
    value = getattr(options, field.name)
    if dataclasses.is_dataclass(value):
      changed[field.name] = _replace(value, values)
    elif field.name in values:
      changed[field.name] = values[field.name]
  return dataclasses.replace(options, **changed)  # type: ignore[type-var]
