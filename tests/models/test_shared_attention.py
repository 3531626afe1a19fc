"""Attention to shared prompts equals attention to rows that have the prompt in front of their own part."""

import functools

import jax
import numpy as np
import pytest

from async_rl import models
from async_rl import rollout

ROWS, OWN, PROMPTS, PROMPT, SAMPLES, HEADS, GROUPS, WIDTH = 8, 12, 4, 20, 3, 4, 2, 16


def inputs(devices=1):
  """Queries, the cache of the own parts, positions in them, and prompts; rows 3 and 7 have none."""
  random = np.random.default_rng(0)
  normal = lambda *shape: random.normal(size=shape).astype(np.float32)
  kv = (normal(ROWS, GROUPS, OWN, WIDTH), normal(ROWS, GROUPS, OWN, WIDTH))
  layers = (normal(PROMPTS, GROUPS, PROMPT, WIDTH), normal(PROMPTS, GROUPS, PROMPT, WIDTH))
  each = ROWS // 2
  # The first half of the rows belongs to the first half of the prompts, so that two devices can hold half of each.
  prompt_of, member = np.array([0, 0, 1, -1, 2, 2, 2, -1]), np.array([2, 0, 1, 0, 0, 1, 2, 0])
  lengths = np.array([PROMPT, 0, 7, 5], np.int32)  # nothing of the second, none has the last
  starts = np.where(prompt_of < 0, 0, lengths[prompt_of]).astype(np.int32)
  rows = np.full((PROMPTS, SAMPLES), ROWS, np.int32)
  rows[prompt_of[prompt_of >= 0], member[prompt_of >= 0]] = np.flatnonzero(prompt_of >= 0)
  places = np.where(prompt_of < 0, 0, prompt_of * SAMPLES + member).astype(np.int32)
  if devices == 2:
    rows = np.where(rows < ROWS, rows % each, each).astype(np.int32)
    places = places % (PROMPTS // 2 * SAMPLES)
  positions = np.array([0, 11, 5, 2, 7, 3, 1, 0], np.int32)
  return normal(ROWS, HEADS, WIDTH), kv, positions, models.SharedPrompts(layers, lengths, rows, places, starts)


def expected(q, kv, positions, prompts, **options):
  """Plain attention to the row's prompt and its own part, one behind the other; of the rows with a prompt."""
  out = []
  for row in (0, 1, 2, 4, 5, 6):
    start, prompt = prompts.starts[row], {0: 0, 1: 0, 2: 1}.get(row, 2)
    whole = [np.concatenate([a[prompt][:, :start], b[row]], 1)[None] for a, b in zip(prompts.layers, kv, strict=True)]
    position = np.array([start + positions[row]], np.int32)
    out.append(models.cache_attention(q[row][None], whole, position, num_kv_heads=GROUPS, scale=0.3, **options)[0])
  return np.array(out)


@pytest.mark.parametrize("options", [{}, {"window": 6, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_attention_to_both_parts(options, devices):
  mesh = rollout.make_mesh(jax.devices()[: 2 * devices], tensor=2) if devices == 2 else None
  attend = functools.partial(models.shared_attention, num_kv_heads=GROUPS, scale=0.3, mesh=mesh, **options)
  got = np.asarray(jax.jit(attend)(*inputs(devices)))
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got[[0, 1, 2, 4, 5, 6]], expected(*inputs(), **options), atol=2e-6)


def test_backends_without_it_are_refused():
  with pytest.raises(ValueError, match="not for the kernel of attention='ragged'"):
    models.check_shared("ragged")
  with pytest.raises(ValueError, match="no power of 2 from 32 to 256; choose attention='xla'"):
    models.check_shared("cudnn")
  models.check_shared("triton")
  models.check_shared("xla")
