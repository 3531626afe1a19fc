"""The order of the cache in memory: the same samples in any order, and on TPUs the one that is never copied."""

import dataclasses

import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import engine_of
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import same

from async_rl import models
from async_rl import rollout
from async_rl import sampling
from async_rl.sampling import _programs
from experiments.plan import _hlo


def by_position(heads, backend):
  return Format(Layout(major_to_minor=(0, 2, 1, 3)), heads)


@pytest.mark.slow
def test_the_order_of_the_cache_changes_no_sample(monkeypatch):
  monkeypatch.setattr(_programs, "_cache_format", by_position)
  policy, params = make()
  config = sampling.SamplerConfig(**{**vars(CONFIG), "length_buckets": 3})  # the cache grows and shrinks
  engine = sampling.Engine(policy, config, STOPS, pad_id=0)
  engine.set_weights(params, 3)
  assert engine._cache.layers[0][0].format.layout.major_to_minor == (0, 2, 1, 3)
  got = sampling.generate(engine, requests_of(range(7)))
  assert engine._cache.layers[0][0].format.layout.major_to_minor == (0, 2, 1, 3)
  same(got, sampling.generate(engine_of(), requests_of(range(7))), exact=False)


def test_decoding_on_tpus_holds_the_cache_once(tpu_chips):
  config = models.ModelConfig(
    vocab_size=256, d_model=128, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=128, d_ff=128
  )
  sizes = sampling.SamplerConfig(
    slots=64, group_size=8, max_prompt_tokens=256, max_new_tokens=256, chunk=32, length_buckets=1
  )
  mesh = rollout.make_mesh(tpu_chips("v5e:2x2")[:1])
  policy = models.Policy(config, attention="splash")
  program = _programs.Programs(policy, sizes, (1,), mesh).decode(sizes.slots, sizes.capacity)
  cache = 2 * 2 * 64 * 8 * sizes.capacity * 128 * 2  # bytes of keys and values
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes >= cache, "the cache is updated in place"
  assert memory.temp_size_in_bytes < cache / 10


@pytest.mark.parametrize(
  ("topology", "data", "tensor"),
  [
    ("v5e:2x2", 1, 1),
    pytest.param("v5e:2x2", 2, 2, marks=pytest.mark.slow),
    ("v5p:2x2x1", 4, 1),
    ("v6e:2x2", 1, 4),
  ],
)
def test_the_ragged_kernel_takes_the_cache_as_it_lies(tpu_chips, topology, data, tensor):
  """With the layers of Qwen3-0.6B, two of them: nothing as large as a part of a layer's cache is moved."""
  config = dataclasses.replace(models.named("qwen3-0.6b"), num_layers=2, vocab_size=1024)
  sizes = sampling.SamplerConfig(
    slots=64 * data * tensor, group_size=8, max_prompt_tokens=320, max_new_tokens=256, chunk=32
  )
  mesh = rollout.make_mesh(tpu_chips(topology)[: data * tensor], tensor=tensor)
  programs = _programs.Programs(models.Policy(config), sizes, (1,), mesh)
  assert {length for _, length in programs.shapes} == {576}, "what reads only what is filled needs no other lengths"
  layer = 2 * 64 * 8 * 576 * 128 * 2  # bytes of a chip's keys and values, more than VMEM could take
  program = programs.trace_decode(sizes.slots, 576).lower().compile()
  memory, text = program.memory_analysis(), program.as_text()
  assert memory.alias_size_in_bytes >= 2 * layer, "the cache is updated in place"
  assert memory.temp_size_in_bytes < layer / 4
  assert text.count('custom_call_target="tpu_custom_call"') == 2
  made = [x for found in _hlo.parse(text).computations.values() for x in found.values()]
  assert any(x.opcode == "copy" for x in made)
  moved = [x for x in made if x.opcode.startswith(("copy", "transpose", "all-gather", "all-to-all"))]
  assert max(shape.hbm_bytes for x in moved for shape in x.shapes) < layer / 4
