"""The slot engine: continuous batching over a fixed number of slots."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.sampling import _decode
from async_rl.sampling import _records
from async_rl.sampling._config import SamplerConfig
from async_rl.sampling._programs import Programs
from async_rl.sampling._records import Sample
from async_rl.types import LENGTH
from async_rl.types import NO_VERSION
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Request

#: A prefix and the slots that it goes into.
_Work = tuple[np.ndarray, list[int]]


@dataclasses.dataclass
class Counters:
  """Running totals of an engine.

  Attributes:
    tokens: drawn.
    prefill_tokens: of prompts and of recomputed prefixes, without padding.
    chunks: decode chunks run.
    steps: decode steps run.
    slot_steps: `steps` times slots; tokens / slot_steps is the occupancy.
    seconds: spent in `step`.
  """

  tokens: int = 0
  prefill_tokens: int = 0
  chunks: int = 0
  steps: int = 0
  slot_steps: int = 0
  seconds: float = 0.0


class Engine:
  """Completes requests K times each, many at once, while the weights change underneath.

  A slot holds one sample. A request waits until K slots are free; its prompt is then computed once and copied into
  them. `step` decodes one chunk and returns what finished. All bookkeeping is on the host; the device holds the
  weights and the cache. A sample is determined by (seed, ticket, index in the group, weights): it does not depend
  on slots or neighbors beyond the rounding of differently shaped programs. Not thread-safe.

  Attributes:
    counters: running totals.
    version: of the current weights, `None` before the first `set_weights`.

  Args:
    policy: the architecture.
    config: sizes and sampling distribution.
    stop_ids: tokens that end a sample; a stop token is kept as the last token of its completion.
    pad_id: any token, put where nothing is.
    mesh: axes among ("data", "fsdp", "tensor"), devices of this process: slots are split over data and fsdp, heads
      over tensor. `None`: the first device.

  Raises:
    ValueError: if the mesh cannot divide the slots, or a token id is outside the vocabulary.

  Examples:
    >>> config = models.ModelConfig(32, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16)
    >>> policy = models.Policy(config, dtype="float32")
    >>> sampler = SamplerConfig(slots=4, group_size=2, max_prompt_tokens=8, max_new_tokens=5)
    >>> engine = Engine(policy, sampler, stop_ids=[1], pad_id=0)
    >>> engine.set_weights(policy.init(jax.random.key(0)), version=7)
    >>> engine.submit(Request(ticket=0, tokens=np.array([3, 14, 15]), prompt=Prompt(0, "", None)))
    >>> while not engine.idle:
    ...   for completion in engine.step():
    ...     print(completion.sample, completion.finish, completion.versions)
    0 length [7 7 7 7 7]
    1 length [7 7 7 7 7]
  """

  def __init__(
    self, policy: Policy, config: SamplerConfig, stop_ids: Sequence[int], pad_id: int, mesh: Mesh | None = None
  ):
    vocab = policy.config.vocab_limit or policy.config.vocab_size
    for token in (pad_id, *stop_ids):
      if not 0 <= token < vocab:
        raise ValueError(f"stop_ids and pad_id must lie in 0..{vocab - 1}, got {token}; is this the model's tokenizer?")
    self._config, self._vocab, self._pad_id = config, vocab, pad_id
    self._stop_ids = tuple(int(i) for i in stop_ids)
    self._programs = Programs(policy, config, self._stop_ids, _mesh_of_one() if mesh is None else mesh)
    self._length = config.lengths[0]
    self._cache = self._programs.init_cache(self._length)
    self._params: Params | None = None
    self._stale = False  # whether the cache is of older weights and to be recomputed
    self._slots: list[Sample | None] = [None] * config.slots
    self._waiting: collections.deque[tuple[Sample, ...]] = collections.deque()  # each tuple shares its prefix
    self.counters = Counters()
    self.version: int | None = None

  # Weights.

  @property
  def weight_shardings(self) -> Params:
    """Where `set_weights` wants prepared weights, so that nothing has to move."""
    return self._programs.param_shardings

  def set_weights(self, params: Params, version: int) -> None:
    """Changes the weights from the next token on; see `SamplerConfig.on_update` for the samples in flight.

    Args:
      params: as from `Policy.init` (copied), or what `prepare_weights` made of them (used as they are: do not
        donate them). They may lie on other devices.
      version: optimizer steps that made them.

    Raises:
      ValueError: if the parameters are not of this policy.
    """
    programs = self._programs
    layout, raw, prepared = map(_layout, (params, programs.raw_params, programs.params))
    if layout == prepared:
      self._params = _place(params, programs.params)
    elif layout == raw:
      self._params = programs.prepare()(_place(params, programs.raw_params))
    else:
      wrong = sorted(set(layout.items()) ^ set(raw.items()))[0]
      raise ValueError(
        "params must be this policy's, stacked and of the dtypes of Policy.init, or from prepare_weights; they "
        f"differ at {wrong[0]}: {layout.get(wrong[0])}, expected {raw.get(wrong[0])}."
      )
    self.version = int(version)
    self._device_version = jax.device_put(np.int32(version), programs.whole)
    self._stale = self._config.on_update == "recompute"

  # Requests.

  def submit(self, request: Request) -> None:
    """Queues a request; `step` starts it as soon as K slots are free.

    Raises:
      ValueError: if the prompt is empty, too long or not of this vocabulary, or the ticket is not a uint32.
    """
    tokens = np.asarray(request.tokens, np.int32)
    name = f"Request {request.ticket} (prompt {getattr(request.prompt, 'id', None)})"
    if tokens.ndim != 1 or not tokens.size:
      raise ValueError(f"{name} must have tokens [T] with T >= 1, got shape {tokens.shape}.")
    if len(tokens) > self._config.max_prompt_tokens:
      raise ValueError(
        f"{name} has {len(tokens)} tokens, more than max_prompt_tokens={self._config.max_prompt_tokens}: "
        "raise max_prompt_tokens, or drop such prompts from the task."
      )
    if tokens.min() < 0 or tokens.max() >= self._vocab:
      raise ValueError(f"{name} has a token outside 0..{self._vocab - 1}; is this the model's tokenizer?")
    if not 0 <= request.ticket < 2**32:
      raise ValueError(f"{name}: tickets must lie in 0..2**32-1, they key the random numbers.")
    fresh = lambda k: Sample.empty(request.ticket, k, tokens, self._config.max_new_tokens)
    self._waiting.append(tuple(fresh(k) for k in range(self._config.group_size)))

  def resume(self, request: Request, completion: Completion, tokens: Sequence[int]) -> None:
    """Takes a finished sample up again, with `tokens` at its end that no policy drew: the turn of a tool.

    It goes on as one sample: positions, the limit of its length and its random numbers count these tokens. It starts
    before the requests that wait, its cache computed anew under the weights of that moment.

    Args:
      request: the sample's.
      completion: as `step` returned it.
      tokens: the context to add; one more token must fit behind it, see `room`.

    Raises:
      ValueError: if they do not fit or are not of this vocabulary.
    """
    name = f"Sample {completion.sample} of request {request.ticket}"
    if len(tokens) >= self.room(completion):
      raise ValueError(
        f"{name} has {len(completion.tokens)} tokens, and {len(tokens)} more leave nothing to draw of "
        f"max_new_tokens={self._config.max_new_tokens}: end it, or raise max_new_tokens."
      )
    if not all(0 <= token < self._vocab for token in tokens):
      raise ValueError(f"{name} was given a token outside 0..{self._vocab - 1}; is this the model's tokenizer?")
    sample = Sample.empty(
      request.ticket, completion.sample, np.asarray(request.tokens, np.int32), self._config.max_new_tokens
    )
    sample.extend(completion.tokens, completion.logprobs, completion.versions)
    sample.extend(np.asarray(tokens, np.int32), np.float32(0), np.int32(NO_VERSION))
    self._waiting.appendleft((sample,))

  def room(self, completion: Completion) -> int:
    """Tokens by which `completion` may still grow."""
    return self._config.max_new_tokens - len(completion.tokens)

  @property
  def free(self) -> int:
    """Slots that neither a live nor a waiting sample will take."""
    return max(0, self._config.slots - len(self._live()) - sum(map(len, self._waiting)))

  def has_room(self) -> bool:
    """Whether one more request would start at the next step."""
    return self.free >= self._config.group_size

  @property
  def idle(self) -> bool:
    """Whether nothing is live and nothing waits."""
    return not self._waiting and not self._live()

  def step(self) -> list[Completion]:
    """Fills free slots, decodes one chunk and returns the samples that finished in it, in the order of slots.

    Raises:
      RuntimeError: if there are no weights yet.
    """
    if self._params is None:
      raise RuntimeError("The engine has no weights; call set_weights first.")
    start = time.perf_counter()
    work = [(s.prefix(), [i]) for i, s in self._live().items()] if self._stale else []
    self._stale = False
    work += self._admit()
    finished = []
    if self._live():
      self._resize(work)
      self._prefill(work)
      finished = self._collect(self._run_chunk())
    self.counters.seconds += time.perf_counter() - start
    return finished

  def generate(self, requests: Iterable[Request]) -> list[Completion]:
    """Runs `requests` to their end; completions come in the order of the requests and of their samples.

    Raises:
      RuntimeError: if samples of other requests are in flight.
    """
    if not self.idle:
      raise RuntimeError("generate needs an idle engine; finish what is in flight with step first.")
    order = {}
    for i, request in enumerate(requests):
      self.submit(request)
      order[request.ticket] = i
    completions: list[Completion] = []
    while not self.idle:
      completions += self.step()
    return sorted(completions, key=lambda c: (order[c.ticket], c.sample))

  # Checkpoints.

  def snapshot(self) -> _records.Snapshot:
    """Everything unfinished, for a checkpoint. The engine goes on unchanged."""
    samples = [*self._live().values(), *itertools.chain(*self._waiting)]
    return _records.pack(samples, self._config.capacity, self._config.max_new_tokens)

  def restore(self, state: _records.Snapshot) -> None:
    """Takes up the samples of a snapshot where they stood; their cache is recomputed under the current weights.

    Raises:
      RuntimeError: if the engine is not idle.
      ValueError: if the limits were lowered below what the samples already have.
    """
    if not self.idle:
      raise RuntimeError("restore needs an idle engine.")
    limits = (self._config.max_prompt_tokens, self._config.max_new_tokens)
    if len(state.tickets) and (state.prompt_lengths.max() > limits[0] or state.lengths.max() >= limits[1]):
      raise ValueError(
        f"The snapshot holds prompts of {state.prompt_lengths.max()} and completions of {state.lengths.max()} tokens, "
        f"too many for (max_prompt_tokens, max_new_tokens)={limits}; restore with limits as high as before."
      )
    samples = _records.unpack(state, limits[1])
    for (_, fresh), group in itertools.groupby(samples, key=lambda s: (s.ticket, not s.length)):
      members = tuple(group)
      self._waiting.extend([members] if fresh else [(s,) for s in members])

  # Programs.

  def warmup(self, resumes: bool = False) -> None:
    """Compiles everything that later calls use. Only what `restore` alone needs is left to its first use.

    Args:
      resumes: whether `resume` will be called.
    """
    c = self._config
    self._programs.compile_all(c.prefix_lengths if resumes or c.on_update == "recompute" else c.prompt_lengths)

  @property
  def compilations(self) -> int:
    """Programs compiled so far."""
    return len(self._programs)

  # The parts of a step.

  def _live(self) -> dict[int, Sample]:
    return {i: s for i, s in enumerate(self._slots) if s is not None}

  def _admit(self) -> list[_Work]:
    free = [i for i, s in enumerate(self._slots) if s is None]
    work = []
    while self._waiting and len(self._waiting[0]) <= len(free):
      samples = self._waiting.popleft()
      taken, free = free[: len(samples)], free[len(samples) :]
      for i, sample in zip(taken, samples, strict=True):
        self._slots[i] = sample
      work.append((samples[0].prefix(), taken))
    return work

  def _resize(self, work: list[_Work]) -> None:
    """Gives the cache the least length that holds all live samples up to the end of the next chunk.

    Layer by layer, so that never two whole caches exist. A copy costs as much as two decode steps; attention to
    positions that hold nothing would cost that in every step.
    """
    room = lambda s: min(self._config.chunk, self._config.max_new_tokens - s.length)
    needed = [len(s.prompt) + s.length + room(s) for s in self._live().values()] + [self._padded(p) for p, _ in work]
    length = next(n for n in self._config.lengths if n >= max(needed))
    if length != self._length:
      layers, self._cache = list(self._cache), ()
      resize, self._length = self._programs.resize(self._length, length), length
      for i in range(len(layers)):
        layers[i] = resize(layers[i])
      self._cache = tuple(layers)

  def _padded(self, prefix: np.ndarray) -> int:
    return next(n for n in self._config.prefix_lengths if n >= len(prefix))

  def _prefill(self, work: list[_Work]) -> None:
    """Puts each prefix into its slots; prefixes of one padded length go together."""
    padded = lambda item: self._padded(item[0])
    for length, group in itertools.groupby(sorted(work, key=padded), key=padded):
      items, rows = list(group), self._programs.prefill_rows(length)
      for i in range(0, len(items), rows):
        self._prefill_call(length, items[i : i + rows])

  def _prefill_call(self, length: int, batch: Sequence[_Work]) -> None:
    programs = self._programs
    rows = programs.prefill_rows(length)
    tokens = np.full((rows, length), self._pad_id, np.int32)
    sources = np.zeros(rows * self._config.group_size, np.int32)
    targets = self._config.slots + np.arange(len(sources), dtype=np.int32)  # beyond the last slot: dropped
    filled = 0
    for row, (prefix, slots) in enumerate(batch):
      tokens[row, : len(prefix)] = prefix
      sources[filled : filled + len(slots)], targets[filled : filled + len(slots)] = row, slots
      filled += len(slots)
      self.counters.prefill_tokens += len(prefix)
    placed = jax.device_put((tokens, sources, targets), (programs.rows, programs.whole, programs.whole))
    computed, put = programs.prefill(length)(self._params, placed[0]), programs.put(length, self._length)
    self._cache = tuple(put(old, new, *placed[1:]) for old, new in zip(self._cache, computed, strict=True))

  def _run_chunk(self) -> _decode.Drawn:
    slots = _decode.no_slots(self._config.slots, self._pad_id)
    for i, s in self._live().items():
      last = s.tokens[s.length - 1] if s.length else s.prompt[-1]
      row = (last, len(s.prompt) + s.length - 1, s.length, s.ticket, s.index, True)
      for array, value in zip(slots, row, strict=True):
        array[i] = value
    placed, decode = jax.device_put(slots, self._programs.rows), self._programs.decode(self._length)
    self._cache, drawn = decode(self._params, self._cache, placed, self._device_version)
    return jax.device_get(drawn)

  def _collect(self, drawn: _decode.Drawn) -> list[Completion]:
    finished = []
    for i, sample in self._live().items():
      new = slice(0, drawn.counts[i])
      sample.extend(drawn.tokens[i, new], drawn.logprobs[i, new], drawn.versions[i, new])
      stopped = int(sample.tokens[sample.length - 1]) in self._stop_ids
      if stopped or sample.length == self._config.max_new_tokens:
        finished.append(sample.completion(STOP if stopped else LENGTH))
        self._slots[i] = None
    self.counters.tokens += int(drawn.counts.sum())
    self.counters.chunks += 1
    self.counters.steps += int(drawn.steps)
    self.counters.slot_steps += int(drawn.steps) * self._config.slots
    return finished


def _mesh_of_one() -> Mesh:
  devices = np.array(jax.local_devices()[:1]).reshape(1, 1, 1)
  return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def _place(tree: Any, like: Any) -> Any:
  return jax.device_put(tree, jax.tree.map(lambda x: x.sharding, like))


def _layout(params: Params) -> dict[str, tuple[tuple[int, ...], str]]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): (leaf.shape, jnp.dtype(leaf.dtype).name) for path, leaf in leaves}
