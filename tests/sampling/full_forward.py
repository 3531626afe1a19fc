"""A sampler that is slow and obviously right: for every token, the whole sequence goes through the policy once more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import sampling
from async_rl.types import LENGTH
from async_rl.types import STOP


class FullForwardSampler(sampling.Sampler):
  """Has no cache, so nothing can be stale: every token is of the current weights, as with `on_update="recompute"`.

  Takes the same arguments as `sampling.Engine`; it runs on the mesh's first device.
  """

  def __init__(self, policy, config, stop_ids, pad_id, mesh=None):
    self._config = config
    self._stop_ids = tuple(stop_ids)
    self._pad_id = pad_id
    self._vocab = policy.config.vocab_limit or policy.config.vocab_size
    self._sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0] if mesh is None else mesh.devices.flat[0])
    self._abstract = jax.eval_shape(functools.partial(sampling.prepare_weights, policy), policy.abstract())
    self._prepare = jax.jit(functools.partial(sampling.prepare_weights, policy))
    self._draw = jax.jit(functools.partial(draw_next, policy, config))
    self._samples = []  # unfinished, in the order of their start; all but the first `slots` wait
    self._params = None
    self.counters = sampling.Counters()

  @property
  def weight_shardings(self):
    mesh = jax.sharding.Mesh([next(iter(self._sharding.device_set))], ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda _: whole, self._abstract)

  def set_weights(self, params, version):
    params = jax.device_put(params, self._sharding)
    if "layers" in params and not isinstance(params["layers"], list):
      params = self._prepare(params)
    layout = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    if layout(params) != layout(self._abstract):
      raise ValueError("params must be this policy's.")
    self._params = params
    self._version = version

  @property
  def checksum(self):
    if self._params is None:
      raise RuntimeError("The sampler has no weights; call set_weights first.")
    return sampling.checksum_weights(self._params)

  def submit(self, request):
    self._samples += sampling.start_samples(request, self._config, self._vocab)

  def resume(self, request, completion, tokens):
    self._samples.insert(0, sampling.continue_sample(request, completion, tokens, self._config, self._vocab))

  def room(self, completion):
    return self._config.max_new_tokens - len(completion.tokens)

  def has_room(self):
    return len(self._samples) + self._config.group_size <= self._config.slots

  @property
  def idle(self):
    return not self._samples

  def step(self):
    if self._params is None:
      raise RuntimeError("The sampler has no weights; call set_weights first.")
    live = self._samples[: self._config.slots]
    finished = []
    for sample in live:
      for _ in range(self._config.chunk):
        token, logprob = self._draw(self._params, *jax.device_put(self._row(sample), self._sharding))
        sample.extend(np.array([token]), np.float32(logprob), np.int32(self._version))
        self.counters.tokens += 1
        stopped = int(token) in self._stop_ids
        if stopped or sample.length == self._config.max_new_tokens:
          finished.append(sample.completion(STOP if stopped else LENGTH))
          self._samples.remove(sample)
          break
    self.counters.chunks += 1
    self.counters.steps += self._config.chunk
    self.counters.slot_steps += self._config.chunk * self._config.slots
    return finished

  def snapshot(self):
    return sampling.pack_samples(self._samples, self._config)

  def restore(self, state):
    if not self.idle:
      raise RuntimeError("restore needs an idle sampler.")
    self._samples = sampling.unpack_samples(state, self._config)

  def warmup(self, resumes=False):
    pass

  def _row(self, sample):
    tokens = np.full(self._config.capacity, self._pad_id, np.int32)
    prefix = sample.prefix()
    tokens[: len(prefix)] = prefix
    scalars = len(prefix), sample.ticket, sample.index, sample.length
    return tokens, *(np.uint32(x) for x in scalars)


def draw_next(policy, config, params, tokens, length, ticket, index, drawn):
  """Draws the token after the first `length` of `tokens` [S], and its log-probability."""
  positions = jnp.arange(len(tokens), dtype=jnp.int32)
  segments = (positions < length).astype(jnp.int32)
  hidden = policy.hidden(params, tokens[None], segments[None], positions[None])[:, length - 1]
  uniforms = sampling.token_uniforms(sampling.sample_key(config.seed, ticket, index), drawn)
  chosen, logprobs = sampling.draw_tokens(policy.logits(params, hidden), uniforms[None], config)
  return chosen[0], logprobs[0]
