"""`control_alignment` against float64 numpy, and what a skip means."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers
from async_rl.stabilizers import AlignmentRegime

LOW, HIGH = 0.2, 0.8
CHOICES = [
  {},
  {"kappa": "remove"},
  {"kappa": "match"},
  {"previous": "projected"},
  {"refresh_on_skip": False},
  {"kappa": "remove", "previous": "projected", "refresh_on_skip": False},
]


def slow_alignment(gradients, kappa="cap", previous="raw", refresh_on_skip=True):
  """What the inner optimizer gets (None on a skip) and the cosine, step by step."""
  last, passed, cosines = None, [], []
  for gradient in gradients:
    cosine = 0.0
    if last is not None:
      cosine = gradient @ last / np.linalg.norm(gradient) / np.linalg.norm(last)
    cosines.append(cosine)
    if cosine >= HIGH:
      passed.append(None)
      last = gradient if refresh_on_skip else last
      continue
    projected = gradient
    if cosine > LOW:
      parallel = (gradient @ last) / (last @ last) * last
      orthogonal = gradient - parallel
      target = {  # length of the parallel part that remains
        "remove": 0.0,
        "cap": LOW * np.linalg.norm(gradient),
        "match": LOW / math.sqrt(1 - LOW**2) * np.linalg.norm(orthogonal),
      }[kappa]
      projected = orthogonal + target * last / np.linalg.norm(last)
    passed.append(projected)
    last = gradient if previous == "raw" else projected
  return passed, cosines


def gradient_sequence(size=12, seed=0):
  """Gradients that go through all three regimes, several times."""
  rng = np.random.default_rng(seed)
  gradients = [rng.normal(size=size)]
  for share in (0.0, 0.5, 0.6, 3.0, 3.0, 0.0, 0.5, -1.0, 0.7, 3.0, 0.5):
    gradients.append(rng.normal(size=size) + share * gradients[-1] * math.sqrt(size) / np.linalg.norm(gradients[-1]))
  return gradients


def as_tree(vector):
  return {"w": jnp.asarray(vector[:8].reshape(4, 2), jnp.float32), "b": jnp.asarray(vector[8:], jnp.float32)}


def as_vector(tree):
  return np.concatenate([np.ravel(tree["w"]), np.ravel(tree["b"])])


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_follows_the_formula_through_all_regimes(choice):
  gradients = gradient_sequence()
  passed, cosines = slow_alignment(gradients, **choice)
  transformation = stabilizers.control_alignment(optax.identity(), LOW, HIGH, **choice)
  update = jax.jit(transformation.update)
  state = transformation.init(as_tree(gradients[0]))
  skips = 0
  regimes = set()
  for gradient, expected, cosine in zip(gradients, passed, cosines, strict=True):
    updates, state = update(as_tree(gradient), state)
    skips += expected is None
    regimes.add(int(state.alignment_regime))
    np.testing.assert_allclose(as_vector(updates), 0 * gradient if expected is None else expected, atol=1e-5)
    np.testing.assert_allclose(state.alignment_cosine, cosine, atol=1e-5)
    np.testing.assert_allclose(state.alignment_norm, np.linalg.norm(gradient), rtol=1e-5)
    assert int(state.skip_count) == skips
  assert regimes == {AlignmentRegime.KEPT, AlignmentRegime.PROJECTED, AlignmentRegime.SKIPPED}


def test_every_choice_changes_the_result():
  results = {str(choice): str(slow_alignment(gradient_sequence(), **choice)) for choice in CHOICES}
  assert len(set(results.values())) == len(CHOICES)


def two_steps(second, **choice):
  """The update for a second gradient after (1, 0)."""
  transformation = stabilizers.control_alignment(optax.identity(), LOW, HIGH, **choice)
  _, state = transformation.update(jnp.array([1.0, 0.0]), transformation.init(jnp.zeros(2)))
  return transformation.update(jnp.array(second), state)


def test_worked_example():
  # g = (3, 4), h = (1, 0): norm 5, cosine 0.6, parallel part (3, 0), orthogonal part (0, 4).
  # The parallel part becomes, for cap, 0.2 * 5 = 1; for remove, 0; for match, x with x / sqrt(x^2 + 4^2) = 0.2.
  np.testing.assert_allclose(two_steps([3.0, 4.0])[0], [1.0, 4.0], rtol=1e-6)
  np.testing.assert_allclose(two_steps([3.0, 4.0], kappa="remove")[0], [0.0, 4.0], atol=1e-6)
  matched = two_steps([3.0, 4.0], kappa="match")[0]
  np.testing.assert_allclose(matched, [0.8 / math.sqrt(0.96), 4.0], rtol=1e-5)
  np.testing.assert_allclose(matched[0] / np.linalg.norm(matched), LOW, rtol=1e-5)


@pytest.mark.parametrize(
  ("cosine", "regime"),
  [
    (0.19, AlignmentRegime.KEPT),
    (0.21, AlignmentRegime.PROJECTED),
    (0.79, AlignmentRegime.PROJECTED),
    (0.81, AlignmentRegime.SKIPPED),
  ],
)
def test_default_thresholds_are_two_and_eight_tenths(cosine, regime):
  transformation = stabilizers.control_alignment(optax.identity())
  _, state = transformation.update(jnp.array([1.0, 0.0]), transformation.init(jnp.zeros(2)))
  _, state = transformation.update(jnp.array([cosine, math.sqrt(1 - cosine**2)]), state)
  assert int(state.alignment_regime) == regime


def test_by_default_five_skips_in_a_row_are_the_most():
  optimizer = stabilizers.control_alignment(optax.sgd(1.0))
  state = optimizer.init(jnp.zeros(2))
  for _ in range(8):
    _, state = optimizer.update(jnp.array([1.0, 0.0]), state)
  assert (int(state.skip_count), int(state.forced_count)) == (5, 2)


def test_only_positive_alignment_is_controlled():
  updates, state = two_steps([-3.0, 0.1])
  np.testing.assert_array_equal(updates, jnp.array([-3.0, 0.1]))
  assert float(state.alignment_cosine) < -0.99
  assert int(state.alignment_regime) == AlignmentRegime.KEPT


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_kept_gradient_is_unchanged_to_the_last_bit(dtype):
  with jax.enable_x64(True):
    optimizer = stabilizers.control_alignment(optax.identity(), LOW, HIGH)
    state = optimizer.init(jnp.zeros(2, dtype))
    for gradient in (jnp.array([1 / 3, 1.0], dtype), jnp.array([-1.0, 1 / 3], dtype)):
      updates, state = optimizer.update(gradient, state)
      np.testing.assert_array_equal(updates, gradient)


def test_infinite_high_never_skips():
  transformation = stabilizers.control_alignment(optax.identity(), LOW, math.inf, kappa="match")
  state = transformation.init(jnp.zeros(2))
  for _ in range(3):  # cosine 1: nothing but a parallel part, so "match" leaves nothing
    updates, state = transformation.update(jnp.ones(2), state)
  np.testing.assert_allclose(updates, [0.0, 0.0], atol=1e-6)
  assert int(state.skip_count) == 0


def test_low_equal_to_high_only_skips():
  transformation = stabilizers.control_alignment(optax.identity(), 0.9999, 0.9999, kappa="match")
  _, state = transformation.update(jnp.array([1.0, 0.0]), transformation.init(jnp.zeros(2)))
  updates, state = transformation.update(jnp.array([30.0, 1.0]), state)
  np.testing.assert_array_equal(updates, jnp.array([30.0, 1.0]))
  updates, state = transformation.update(jnp.array([60.0, 2.0]), state)
  np.testing.assert_array_equal(updates, jnp.zeros(2))


def assert_equal_trees(x, y):
  jax.tree.map(np.testing.assert_array_equal, x, y)


def test_a_skip_changes_neither_parameters_nor_moments_but_zero_updates_would():
  params = {"w": jnp.array([1.0, -2.0, 3.0])}
  gradient = {"w": jnp.array([0.5, 0.1, -0.3])}
  adamw = optax.adamw(1e-2, weight_decay=0.1)
  optimizer = stabilizers.control_alignment(adamw, LOW, HIGH)
  updates, state = optimizer.update(gradient, optimizer.init(params), params)
  params = optax.apply_updates(params, updates)

  updates, skipped = optimizer.update(gradient, state, params)  # the same gradient again: cosine 1
  assert int(skipped.alignment_regime) == AlignmentRegime.SKIPPED
  assert_equal_trees(optax.apply_updates(params, updates), params)
  assert_equal_trees(skipped.inner_state, state.inner_state)  # moments and Adam's own counter

  # Handing zeros to Adam instead: the moments decay, and momentum and weight decay still move the weights.
  updates, zeroed = adamw.update(optax.tree.zeros_like(gradient), state.inner_state, params)
  moved = np.abs(np.asarray(optax.apply_updates(params, updates)["w"] - params["w"]))
  assert np.all(moved > 1e-3)
  assert np.all(np.asarray(optax.tree.get(zeroed, "mu")["w"]) != np.asarray(optax.tree.get(state, "mu")["w"]))

  # And so does zeroing the updates after Adam, as a transformation behind it could: the moments have moved on.
  _, behind = adamw.update(gradient, state.inner_state, params)
  assert np.all(np.asarray(optax.tree.get(behind, "mu")["w"]) != np.asarray(optax.tree.get(state, "mu")["w"]))


def test_skip_freezes_what_a_skipped_step_would_have_seen_next():
  """After a skip, training goes on as if the skipped gradient had never been."""
  gradients = [np.array(v, np.float64) for v in ([1, 0, 0, 0], [2, 0.1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])]
  adam = optax.adam(0.1)

  def train(optimizer, sequence):
    params = jnp.zeros(4)
    state = optimizer.init(params)
    for gradient in sequence:
      updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
      params = optax.apply_updates(params, updates)
    return params

  with_skip = train(stabilizers.control_alignment(adam, LOW, HIGH), gradients)
  assert_equal_trees(with_skip, train(adam, [gradients[0], *gradients[2:]]))


def test_a_skip_does_not_advance_random_keys_or_schedules():
  inner = optax.chain(optax.add_noise(0.1, 0.9, key=0), optax.sgd(lambda count: 0.1 / (1 + count)))
  optimizer = stabilizers.control_alignment(inner, LOW, HIGH)
  _, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(jnp.zeros(2)))
  _, skipped = optimizer.update(jnp.array([3.0, 4.0]), state)
  _, kept = optimizer.update(jnp.array([-3.0, 4.0]), state)
  data = lambda state: jax.random.key_data(optax.tree.get(state, "rng_key"))
  assert int(skipped.skip_count) == 1
  np.testing.assert_array_equal(data(skipped), data(state))
  assert np.any(data(kept) != data(state))
  counts = [[int(count) for _, count in optax.tree.get_all_with_path(s, "count")] for s in (state, skipped, kept)]
  assert counts == [[1, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1e30])  # the last one's square is not a float32
def test_gradient_without_a_finite_norm_is_skipped_and_forgotten(bad):
  params = jnp.array([1.0, 2.0])
  optimizer = stabilizers.control_alignment(optax.adam(0.1), LOW, HIGH)
  _, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(params), params)
  updates, after = optimizer.update(jnp.array([bad, 1.0]), state, params)
  np.testing.assert_array_equal(updates, jnp.zeros(2))
  assert int(after.alignment_regime) == AlignmentRegime.SKIPPED
  assert float(after.alignment_cosine) == 0.0
  assert float(after.alignment_norm) == 5.0  # of the last finite one
  assert_equal_trees(after.inner_state, state.inner_state)
  assert_equal_trees(after.alignment_previous, state.alignment_previous)


def test_gradients_without_a_cosine_are_kept():
  optimizer = stabilizers.control_alignment(optax.identity(), low=0.0, high=0.0)  # skips every cosine >= 0
  state = optimizer.init(jnp.zeros(2))
  for gradient in (jnp.array([3.0, 4.0]), jnp.zeros(2), jnp.array([3.0, 4.0])):  # first, zero, after a zero
    updates, state = optimizer.update(gradient, state)
    np.testing.assert_array_equal(updates, gradient)
    assert float(state.alignment_cosine) == 0.0
    assert int(state.alignment_regime) == AlignmentRegime.KEPT


def aligned_run(gradients, **options):
  """The state after each of *gradients*, and the first component of each update."""
  optimizer = stabilizers.control_alignment(optax.adam(0.1), LOW, HIGH, **options)
  update, state = jax.jit(optimizer.update), optimizer.init(jnp.zeros(2))
  states, moved = [], []
  for gradient in gradients:
    updates, state = update(jnp.array(gradient), state)
    states.append(state)
    moved.append(float(updates[0]))
  return states, moved


A, B, NAN = (1.0, 0.0), (0.0, 1.0), (math.nan, 0.0)


def test_after_the_limit_aligned_gradients_are_projected_and_counted_until_one_is_not_aligned():
  gradients = [A, A, A, A, A, B, B, B, B]
  states, moved = aligned_run(gradients, max_consecutive_skips=2)
  kept, skipped, forced = AlignmentRegime.KEPT, AlignmentRegime.SKIPPED, AlignmentRegime.FORCED
  regimes = [kept, skipped, skipped, forced, forced, kept, skipped, skipped, forced]
  assert [int(state.alignment_regime) for state in states] == regimes
  assert [int(state.consecutive_aligned_count) for state in states] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
  assert [int(state.skip_count) for state in states] == [0, 1, 2, 2, 2, 2, 3, 4, 4]
  assert [int(state.forced_count) for state in states] == [0, 0, 0, 1, 2, 2, 2, 2, 3]
  assert [value != 0 for value in moved] == [regime != skipped for regime in regimes]


def test_a_forced_step_uses_the_projected_gradient():
  optimizer = stabilizers.control_alignment(optax.identity(), LOW, HIGH, max_consecutive_skips=0, previous="projected")
  _, state = optimizer.update(jnp.array([1.0, 0.0]), optimizer.init(jnp.zeros(2)))
  updates, state = optimizer.update(jnp.array([12.0, 5.0]), state)  # norm 13, cosine 12/13: 12 becomes 0.2 * 13
  np.testing.assert_allclose(updates, [2.6, 5.0], rtol=1e-6)
  np.testing.assert_allclose(state.alignment_previous, updates)


def test_a_gradient_that_is_not_finite_is_never_forced_and_leaves_the_count_alone():
  states, moved = aligned_run([A, A, NAN, NAN, A, A], max_consecutive_skips=2)
  assert [int(state.consecutive_aligned_count) for state in states] == [0, 1, 1, 1, 2, 3]
  assert [value != 0 for value in moved] == [True, False, False, False, False, True]
  assert int(states[-1].skip_count) == 4


def test_without_a_limit_aligned_gradients_are_always_skipped():
  states, _ = aligned_run([A] * 20, max_consecutive_skips=None)
  assert int(states[-1].skip_count) == 19
  assert int(states[-1].forced_count) == 0


def test_the_limit_guards_an_on_policy_bandit_against_the_stall():
  payoffs = jnp.array([0.0, 0.2, 0.4, 1.0])

  def reward_after(optimizer, steps=60):
    def step(carry, key):
      logits, state = carry
      arms = jax.random.categorical(key, logits, shape=(64,))
      advantages = payoffs[arms] - jnp.mean(payoffs[arms])
      gradient = jax.grad(lambda x: -jnp.mean(advantages * jax.nn.log_softmax(x)[arms]))(logits)
      updates, state = optimizer.update(gradient, state, logits)
      return (optax.apply_updates(logits, updates), state), None

    start = (jnp.zeros(4), optimizer.init(jnp.zeros(4)))
    (logits, state), _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), steps))
    return float(jax.nn.softmax(logits) @ payoffs), state

  adam = optax.adam(0.1)
  stalled, stalled_state = reward_after(stabilizers.control_alignment(adam, max_consecutive_skips=None))
  guarded, guarded_state = reward_after(stabilizers.control_alignment(adam))
  assert int(stalled_state.skip_count) > 40
  assert int(guarded_state.skip_count) < 30
  assert stalled < 0.6
  assert guarded > 0.9
  assert reward_after(adam)[0] > 0.9


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_cosine_does_not_depend_on_the_size_of_gradients(factor):
  optimizer = stabilizers.control_alignment(optax.identity(), LOW, HIGH)
  _, state = optimizer.update(factor * jnp.array([1.0, 0.0]), optimizer.init(jnp.zeros(2)))
  updates, state = optimizer.update(jnp.array([3.0, 4.0]) / factor, state)
  np.testing.assert_allclose(state.alignment_cosine, 0.6, rtol=1e-5)
  np.testing.assert_allclose(updates * factor, [1.0, 4.0], rtol=1e-5)


def test_a_previous_gradient_in_bfloat16_halves_the_buffer_and_keeps_the_cosine():
  params = {"w": jnp.zeros((64, 64))}
  gradients = [{"w": jnp.asarray(np.random.default_rng(seed).normal(size=(64, 64)), jnp.float32)} for seed in range(2)]
  gradients[1] = jax.tree.map(lambda g, h: g + 0.5 * h, gradients[1], gradients[0])
  states = []
  for dtype in (None, "bfloat16"):
    optimizer = stabilizers.control_alignment(optax.identity(), LOW, HIGH, storage_dtype=dtype)
    state = optimizer.init(params)
    for gradient in gradients:
      updates, state = optimizer.update(gradient, state)
    assert updates["w"].dtype == jnp.float32
    states.append(state)
  exact, rounded = states
  assert rounded.alignment_previous["w"].nbytes * 2 == exact.alignment_previous["w"].nbytes
  np.testing.assert_allclose(rounded.alignment_cosine, exact.alignment_cosine, atol=1e-3)


def test_cosine_is_the_same_before_and_after_global_clipping():
  gradients = [as_tree(g) for g in gradient_sequence()]
  clip = optax.clip_by_global_norm(0.1)
  outside = stabilizers.control_alignment(optax.identity(), LOW, HIGH)
  inside = optax.chain(clip, stabilizers.control_alignment(optax.identity(), LOW, HIGH))
  state, clipped_state = outside.init(gradients[0]), inside.init(gradients[0])
  update, clipped_update = jax.jit(outside.update), jax.jit(inside.update)
  for gradient in gradients:
    _, state = update(gradient, state)
    _, clipped_state = clipped_update(gradient, clipped_state)
    np.testing.assert_allclose(clipped_state[1].alignment_cosine, state.alignment_cosine, atol=1e-5)


def test_ess_scale_inside_and_outside_are_the_same():
  adamw = optax.adamw(1e-2)
  inside = stabilizers.control_alignment(optax.chain(adamw, stabilizers.scale_by_ess()), LOW, HIGH)
  outside = optax.chain(stabilizers.control_alignment(adamw, LOW, HIGH), stabilizers.scale_by_ess())
  params = as_tree(np.ones(12))
  states = [inside.init(params), outside.init(params)]
  updates = [jax.jit(inside.update), jax.jit(outside.update)]
  log_weights = jnp.array([0.0, 0.0, -1.0, -2.0])
  for gradient in gradient_sequence()[:6]:
    results = [
      update(as_tree(gradient), state, params, log_weights=log_weights)
      for update, state in zip(updates, states, strict=True)
    ]
    states = [state for _, state in results]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), results[0][0], results[1][0])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"low": -0.1}, r"\*low\* must be a number at least 0, got low=-0.1"),
    ({"low": 0.5, "high": 0.4}, r"\*high\* must be a number at least 0.5, got high=0.4"),
    ({"kappa": "half"}, r"\*kappa\* must be one of 'cap', 'remove', 'match', got kappa='half'"),
    ({"previous": "mean"}, r"\*previous\* must be one of 'raw', 'projected', got previous='mean'"),
    ({"high": float("nan")}, "got high=nan"),
    ({"low": np.float32(-1)}, "got low=-1.0"),
    ({"low": math.inf, "high": math.inf}, "got low=inf"),
    ({"max_consecutive_skips": -1}, r"\*max_consecutive_skips\* must be an integer at least 0, got"),
    ({"max_consecutive_skips": 1.5}, "got max_consecutive_skips=1.5"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.control_alignment(optax.identity(), **arguments)
