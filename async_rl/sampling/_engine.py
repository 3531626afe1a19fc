"""The slot engine: continuous batching over a fixed number of slots."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import mesh_of_one
from async_rl.sampling import _decode
from async_rl.sampling._checksum import join_sums
from async_rl.sampling._checksum import weight_parts
from async_rl.sampling._programs import Programs
from async_rl.sampling._sampler import Counters
from async_rl.sampling._sampler import Sampler
from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.sampling._samples import Sample
from async_rl.sampling._samples import Snapshot
from async_rl.sampling._samples import continue_sample
from async_rl.sampling._samples import pack_samples
from async_rl.sampling._samples import start_samples
from async_rl.sampling._samples import unpack_samples
from async_rl.sampling._shared_cache import SharedCache
from async_rl.sampling._slot_cache import SlotCache
from async_rl.sampling._slot_cache import live_slots
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Request

#: A prefix and the slots that it is copied into.
_Work = tuple[np.ndarray, list[int]]


class Engine(Sampler):
  """A sampler that decodes a fixed number of slots together and refills those that finish.

  A slot holds one sample. A request waits until K slots are free; its prompt is then computed once and copied into
  them. `step` decodes one chunk and returns the samples that finished. All bookkeeping is on the host; the device
  holds the weights and the cache. A sample is determined by (seed, ticket, index in the group, weights): it does not
  depend on slots or neighbors beyond the rounding of differently shaped programs. Not thread-safe.

  Attributes:
    counters: the running totals.
    version: the version of the current weights, `None` before the first `set_weights`.

  Args:
    policy: the architecture.
    config: the sizes and the sampling distribution.
    stop_ids: the tokens that end a sample; a stop token is kept as the last token of its completion.
    pad_id: the id used to fill unused positions.
    mesh: the devices, all of this process, with axes among ("data", "fsdp", "tensor"): slots are split over data and
      fsdp, heads over tensor. `None` uses the first device.

  Raises:
    ValueError: if the mesh cannot divide the slots, a token id is outside the vocabulary, or the backend of attention
      takes no shared prompts.

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
    self._config = config
    self._vocab = vocab
    self._pad_id = pad_id
    self._stop_ids = frozenset(int(i) for i in stop_ids)
    mesh = mesh_of_one(jax.local_devices()[0]) if mesh is None else mesh
    self._programs = Programs(policy, config, tuple(sorted(self._stop_ids)), mesh)
    cache = SharedCache if config.shares_prompts else SlotCache
    self._cache = cache(self._programs, config.slots)
    self._params: Params | None = None
    self._stale = False  # whether the cache must be recomputed under newer weights
    self._slots: list[Sample | None] = [None] * config.slots
    self._waiting: collections.deque[tuple[Sample, ...]] = collections.deque()  # each tuple shares its prefix
    self.counters = Counters()
    self.version: int | None = None

  # Weights.

  @property
  def weight_shardings(self) -> Params:
    """Returns the shardings in which `set_weights` takes prepared weights without moving them."""
    return self._programs.param_shardings

  def set_weights(self, params: Params, version: int) -> None:
    """Changes the weights from the next token on; see `SamplerConfig.on_update` for unfinished samples.

    Args:
      params: the parameters, as from `Policy.init` (copied) or from `prepare_weights` (used as they are: do not donate
        them). They may lie on other devices.
      version: the number of optimizer steps that made them.

    Raises:
      ValueError: if the parameters are not this policy's.
    """
    programs = self._programs
    if _alike(params, programs.params):
      self._params = _place(params, programs.params)
    elif _alike(params, programs.raw_params):
      self._params = programs.prepare()(_place(params, programs.raw_params))
    else:
      raise ValueError(
        "params must be this policy's, stacked and of the dtypes of Policy.init, or from prepare_weights; they "
        f"differ {_difference(params, programs.raw_params, programs.params)}."
      )
    self._sums = [programs.checksum(name)(part) for name, part in weight_parts(self._params)]
    self.version = int(version)
    self._device_version = jax.device_put(np.int32(version), programs.whole)
    self._stale = self._config.on_update == "recompute"

  @property
  def checksum(self) -> int:
    """The checksum of the weights, see `checksum_weights`; waits until it is computed.

    Raises:
      RuntimeError: if there are no weights yet.
    """
    if self._params is None:
      raise RuntimeError("The engine has no weights; call set_weights first.")
    return join_sums(jax.device_get(self._sums))

  # Requests.

  def submit(self, request: Request) -> None:
    """Queues a request; `step` starts it as soon as K slots are free.

    Raises:
      ValueError: if the prompt is empty, too long or not of this vocabulary, or the ticket is not a uint32.
    """
    self._waiting.append(start_samples(request, self._config, self._vocab))

  def resume(self, request: Request, completion: Completion, tokens: Sequence[int]) -> None:
    """Resumes a finished sample after appending `tokens` that the policy did not draw, such as a tool's reply.

    Positions, the length limit and the random numbers count these tokens. The sample starts before the requests that
    wait, and its cache is recomputed under the weights of that moment.

    Args:
      request: the sample's request.
      completion: the finished sample, as `step` returned it.
      tokens: the context to append; at least one more token must fit behind it, see `room`.

    Raises:
      ValueError: if the tokens do not fit or are not of this vocabulary.
    """
    self._waiting.appendleft((continue_sample(request, completion, tokens, self._config, self._vocab),))

  def room(self, completion: Completion) -> int:
    """Returns the number of tokens by which `completion` may still grow."""
    return self._config.max_new_tokens - len(completion.tokens)

  @property
  def free(self) -> int:
    """Returns the number of slots that neither a live nor a waiting sample will take."""
    return max(0, self._config.slots - len(self._live()) - sum(map(len, self._waiting)))

  def has_room(self) -> bool:
    """Returns whether one more request would start at the next `step`."""
    return self.free >= self._config.group_size

  @property
  def idle(self) -> bool:
    """Returns whether nothing is live and nothing waits."""
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
      self._fit_cache(work)
      self._prefill(work)
      finished = self._collect(self._run_chunk())
    self.counters.seconds += time.perf_counter() - start
    return finished

  # Checkpoints.

  def snapshot(self) -> Snapshot:
    """Returns every unfinished sample, for a checkpoint. The engine itself goes on unchanged."""
    return pack_samples([*self._live().values(), *itertools.chain(*self._waiting)], self._config)

  def restore(self, state: Snapshot) -> None:
    """Continues the samples of a snapshot; their cache is recomputed under the current weights.

    Raises:
      RuntimeError: if the engine is not idle.
      ValueError: if the limits were lowered below the lengths that the samples already have.
    """
    if not self.idle:
      raise RuntimeError("restore needs an idle engine; finish its unfinished samples with step first.")
    samples = unpack_samples(state, self._config)
    for (_, fresh), group in itertools.groupby(samples, key=lambda s: (s.ticket, not s.length)):
      members = tuple(group)
      self._waiting.extend([members] if fresh else [(s,) for s in members])

  # Programs.

  def warmup(self, resumes: bool = False) -> None:
    """Compiles everything that later calls use, except what `restore` alone needs.

    Args:
      resumes: whether `resume` will be called.
    """
    c = self._config
    continued = resumes or c.on_update == "recompute"
    self._programs.compile_all(c.prefix_lengths if continued else c.prompt_lengths, continued)

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    return len(self._programs)

  @property
  def cache_shape(self) -> tuple[int, int]:
    """Returns the numbers of rows and of positions of the cache, which decide what a decode step costs."""
    return self._cache.shape

  @property
  def cache_bytes(self) -> int:
    """Returns the bytes of the keys and values of all slots, on all devices together."""
    return self._cache.nbytes

  # The parts of a step.

  def _live(self) -> dict[int, Sample]:
    return {i: s for i, s in enumerate(self._slots) if s is not None}

  def _admit(self) -> list[_Work]:
    if not self._waiting:
      return []
    free = self._cache.fill_order(live_slots(self._slots))
    work = []
    while self._waiting and len(self._waiting[0]) <= len(free):
      samples = self._waiting.popleft()
      taken, free = free[: len(samples)], free[len(samples) :]
      self._cache.claim(taken, self._slots)
      for i, sample in zip(taken, samples, strict=True):
        self._slots[i] = sample
      work.append((samples[0].prefix(), taken))
    return work

  def _fit_cache(self, work: list[_Work]) -> None:
    """Gives the cache the shape that holds all live samples up to the end of the next chunk."""
    chunk, limit = self._config.chunk, self._config.max_new_tokens
    drawn = [0 if s is None else min(s.length + chunk, limit) for s in self._slots]
    self._cache.fit(self._slots, drawn, [self._padded_length(prefix) for prefix, _ in work])

  def _padded_length(self, prefix: np.ndarray) -> int:
    return next(n for n in self._config.prefix_lengths if n >= len(prefix))

  def _prefill(self, work: list[_Work]) -> None:
    """Computes each prefix and copies it into its slots; prefixes of one padded length go together."""

    def padded_length(item: _Work) -> int:
      return self._padded_length(item[0])

    for length, group in itertools.groupby(sorted(work, key=padded_length), key=padded_length):
      items = list(group)
      rows = self._programs.prefill_rows(length)
      for i in range(0, len(items), rows):
        self._prefill_call(length, items[i : i + rows])

  def _prefill_call(self, length: int, batch: Sequence[_Work]) -> None:
    programs = self._programs
    rows = programs.prefill_rows(length)
    tokens = np.full((rows, length), self._pad_id, np.int32)
    for row, (prefix, _) in enumerate(batch):
      tokens[row, : len(prefix)] = prefix
      self.counters.prefill_tokens += len(prefix)
    computed = programs.prefill(length)(self._params, jax.device_put(tokens, programs.rows))
    self._cache.put(length, computed, [slots for _, slots in batch], self._slots)

  def _run_chunk(self) -> _decode.Drawn:
    rows = _decode.no_slots(self._cache.shape[0], self._pad_id)
    at, live = zip(*self._live_rows(), strict=True)
    values = [(s.last_token, len(s.prompt) + s.length - 1, s.length, s.ticket, s.index, True) for s in live]
    for array, column in zip(rows, np.array(values, np.int64).T, strict=True):
      array[list(at)] = column
    placed = jax.device_put(rows, self._programs.rows)
    decode = self._programs.decode(*self._cache.shape, self._cache.prompt_count)
    prompts = self._cache.prompts(self._slots)
    self._cache.layers, drawn = decode(self._params, self._cache.layers, placed, self._device_version, prompts)
    return jax.device_get(drawn)

  def _collect(self, drawn: _decode.Drawn) -> list[Completion]:
    finished = []
    counts, slots = drawn.counts.tolist(), self._cache.slots.tolist()
    for row, sample in self._live_rows():
      new = slice(0, counts[row])
      sample.extend(drawn.tokens[row, new], drawn.logprobs[row, new], drawn.versions[row, new])
      stopped = sample.last_token in self._stop_ids
      if stopped or sample.length == self._config.max_new_tokens:
        finished.append(sample.completion(STOP if stopped else LENGTH))
        self._slots[slots[row]] = None
    self.counters.tokens += sum(counts)
    self.counters.chunks += 1
    self.counters.steps += int(drawn.steps)
    self.counters.slot_steps += int(drawn.steps) * self._config.slots
    return finished

  def _live_rows(self) -> list[tuple[int, Sample]]:
    return [(row, s) for row, slot in enumerate(self._cache.slots.tolist()) if (s := self._slots[slot]) is not None]


def _place(tree: Any, like: Any) -> Any:
  """Moves a tree to the shardings of another; returns the same arrays if they lie there already."""
  shardings = [x.sharding for x in jax.tree.leaves(like)]
  leaves, structure = jax.tree.flatten(tree)
  if all(getattr(x, "sharding", None) == sharding for x, sharding in zip(leaves, shardings, strict=True)):
    return tree
  return jax.tree.unflatten(structure, jax.device_put(leaves, shardings))


def _alike(params: Params, abstract: Params) -> bool:
  """Returns whether parameters have this structure and these shapes and dtypes."""
  structure: Any = jax.tree.structure(params)
  if structure != jax.tree.structure(abstract):
    return False
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True)
  return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


def _difference(params: Params, *accepted: Params) -> str:
  """Says where parameters first differ from the most similar of several: a leaf, or what holds the leaves."""
  layout = _layout(params)
  other = min(map(_layout, accepted), key=lambda other: len(layout.keys() ^ other.keys()))
  if not (differing := layout.items() ^ other.items()):
    return "in their containers: give them as dicts and lists"
  name = min(differing)[0]
  return f"at {name}: {layout.get(name)}, expected {other.get(name)}"


def _layout(params: Params) -> dict[str, tuple[tuple[int, ...], str]]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): (leaf.shape, jnp.dtype(leaf.dtype).name) for path, leaf in leaves}
