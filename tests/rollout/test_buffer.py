"""The lag bound under every interleaving: by brute force, at random, and with real threads."""

import itertools
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from rollout_helpers import PROMPTS
from rollout_helpers import make_group
from rollout_helpers import submit_all
from rollout_helpers import tickets

from async_rl._monitor import Closed
from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.types import NO_VERSION


def test_lag_zero_is_synchronous():
  buffer = RolloutBuffer(groups_per_step=3, max_lag=0, steps=2)
  assert submit_all(buffer, 0) == [0, 1, 2]
  for ticket in (2, 0):
    buffer.add_group(make_group(ticket))
  with pytest.raises(TimeoutError, match=r"2 groups complete, 1 pending \(the oldest: \[1\]\)"):
    buffer.take_batch(0, timeout=0)
  buffer.add_group(make_group(1))
  assert tickets(buffer.take_batch(0, timeout=0)) == [0, 1, 2]
  assert buffer.try_submit(0) is None  # old weights may sample nothing more
  assert submit_all(buffer, 1) == [3, 4, 5]
  for ticket in (5, 4, 3):
    buffer.add_group(make_group(ticket, (1,)))
  assert tickets(buffer.take_batch(1, timeout=0)) == [3, 4, 5]
  assert buffer.try_submit(2) is None
  with pytest.raises(EndOfData, match="after 2 steps"):
    buffer.take_batch(2)


def test_a_token_older_than_the_submission_is_found_in_any_sample_and_at_any_place():
  buffer = RolloutBuffer(groups_per_step=1, max_lag=3, steps=9)
  buffer.add_group(make_group(buffer.try_submit(0)))
  buffer.take_batch(0, timeout=0)
  ticket = next(t for t in iter(lambda: buffer.try_submit(1), None) if buffer._stamps[t] == 1)
  new, mixed = make_group(ticket, (1, 1)), make_group(ticket, (1, 0, 1))
  for completions in [(mixed.completions[0], new.completions[1]), (new.completions[0], mixed.completions[1])]:
    with pytest.raises(
      ValueError, match=f"group {ticket} has a token of version 0, but was submitted with weights of 1"
    ):
      buffer.add_group(new._replace(completions=completions))
  buffer.add_group(new)


def test_groups_and_state_are_ordered_by_ticket():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=4)
  assert submit_all(buffer, 0) == list(range(10))
  for ticket in (7, 1, 9, 3):
    buffer.add_group(make_group(ticket))
  assert tickets(buffer.groups()) == [1, 3, 7, 9]
  assert buffer.state()["complete"]["ticket"].tolist() == [1, 3, 7, 9]
  assert buffer.state()["groups"]["ticket"].tolist() == [1, 3, 7, 9]
  assert buffer.state()["pending"]["ticket"].tolist() == [0, 2, 4, 5, 6, 8]


def test_counts_in_the_middle_of_a_run():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=2)
  first = submit_all(buffer, 0)
  for ticket in first[:3]:
    buffer.add_group(make_group(ticket))
  buffer.fail_group(first[4], "reward")
  buffer.take_batch(0, timeout=0)
  assert len(first) == 6
  assert buffer.count_groups() == {"submitted": 5, "pending": 2, "complete": 1, "trained": 2, "failed": 1}


def test_young_groups_cannot_starve_old_ones():
  """Why waiting for a group only at its own deadline is not enough.

  With max_lag 2 and one group a step, A, B and C are submitted at version 0. Trained as they complete, C would go
  first, then D of version 1; at step 2 both A and B would be due, and one of them be trained at lag 3.
  """
  buffer = RolloutBuffer(groups_per_step=1, max_lag=2)
  a, b, c = submit_all(buffer, 0)
  buffer.add_group(make_group(c))
  assert tickets(buffer.take_batch(0, timeout=0)) == [c]  # A and B can still go at steps 1 and 2
  (d,) = submit_all(buffer, 1)
  buffer.add_group(make_group(d, (1,)))
  with pytest.raises(TimeoutError):
    buffer.take_batch(1, timeout=0)  # D now would leave both A and B for step 2
  buffer.add_group(make_group(b))
  assert tickets(buffer.take_batch(1, timeout=0)) == [b]
  with pytest.raises(TimeoutError):
    buffer.take_batch(2, timeout=0)
  buffer.add_group(make_group(a))
  assert tickets(buffer.take_batch(2, timeout=0)) == [a]
  assert tickets(buffer.take_batch(3, timeout=0)) == [d]


@settings(max_examples=200, deadline=None)
@given(
  st.integers(1, 3), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=8)
)
def test_choice_is_feasible_whenever_any_is(groups_per_step, max_lag, items):
  """`_choose` against the definition of rule (b), tried over all subsets."""
  version = 3
  buffer = RolloutBuffer(groups_per_step, max_lag)
  buffer._taken = version
  buffer._stamps = {ticket: stamp for ticket, (stamp, _) in enumerate(items)}
  buffer._complete = {ticket: make_group(ticket) for ticket, (_, complete) in enumerate(items) if complete}

  def allowed(chosen):
    deadlines = [stamp + max_lag for ticket, stamp in buffer._stamps.items() if ticket not in chosen]
    return all(sum(d <= s for d in deadlines) <= (s - version) * groups_per_step for s in range(version, 20))

  choices = [set(c) for c in itertools.combinations(buffer._complete, groups_per_step) if allowed(c)]
  chosen = buffer._choose()
  assert (chosen is not None) == bool(choices)
  if chosen is not None:
    assert set(chosen) in choices


@settings(max_examples=150, deadline=None)
@given(
  seed=st.integers(0, 2**32),
  groups_per_step=st.integers(1, 4),
  max_lag=st.integers(0, 5),
  samplers=st.integers(1, 3),
  failing=st.sampled_from([0.0, 0.2]),
)
def test_every_interleaving_keeps_the_bound_and_ends(seed, groups_per_step, max_lag, samplers, failing):
  """A random scheduler: any enabled action may come next; checkpoints and restores come in between."""
  rng = random.Random(seed)
  steps = 12
  buffer = RolloutBuffer(groups_per_step, max_lag, steps=steps)
  held = [0] * samplers  # version of each sampler's weights
  owner, trained, failed, version = {}, [], [], 0  # owner: ticket -> (sampler, versions of its tokens so far)

  def swap(i):
    held[i] = rng.randint(held[i], version)

  def submit(i):
    ticket = buffer.try_submit(held[i])
    if ticket is not None:
      owner[ticket] = (i, [held[i]])

  def finish(i):
    mine = [ticket for ticket, (sampler, _) in owner.items() if sampler == i]
    if mine:
      ticket = rng.choice(mine)
      _, versions = owner.pop(ticket)
      if rng.random() < failing:
        failed.append(ticket)
        buffer.fail_group(ticket, "reward")
      else:
        buffer.add_group(make_group(ticket, (*versions, held[i])))  # the weights may have changed while it was drawn

  def restart():
    nonlocal buffer
    state = buffer.state()
    kept = {ticket for ticket in owner if rng.random() < 0.5}
    buffer = RolloutBuffer(groups_per_step, max_lag, steps=steps)
    buffer.restore(state, PROMPTS, in_flight=kept)
    for ticket in owner.keys() - kept:
      del owner[ticket]
    held[:] = [version] * samplers

  for _ in range(20_000):
    rng.choices([swap, submit, finish], [1, 3, 2])[0](rng.randrange(samplers))
    if rng.random() < 0.01:
      restart()
    try:
      groups = buffer.take_batch(version, timeout=0)
    except TimeoutError:
      continue
    except EndOfData:
      break
    assert len(groups) == groups_per_step
    for group in groups:
      lags = [version - v for c in group.completions for v in c.versions[c.mask]]
      assert min(lags) >= 0
      assert max(lags) <= max_lag
    trained += tickets(groups)
    version += 1
  else:
    pytest.fail(f"no progress: {buffer.state()}")
  assert version == steps
  assert sorted(trained + failed) == list(range(len(trained) + len(failed)))  # all that was submitted, each once
  assert buffer.count_groups() == {
    "submitted": steps * groups_per_step,
    "pending": 0,
    "complete": 0,
    "trained": steps * groups_per_step,
    "failed": len(failed),
  }


@pytest.mark.parametrize(("max_lag", "samplers"), [(0, 1), (1, 2), (4, 3)])
def test_threads_with_random_delays(max_lag, samplers):
  groups_per_step, steps = 3, 25
  buffer = RolloutBuffer(groups_per_step, max_lag, steps=steps)
  published = 0

  def sample(seed):
    rng = random.Random(seed)
    work = {}
    try:
      while True:
        version = published
        ticket = buffer.try_submit(version) if work else buffer.wait_submit(version)
        if ticket is not None:
          work[ticket] = [version]
        if work and (ticket is None or rng.random() < 0.5):
          time.sleep(rng.random() * 2e-3)
          ticket, versions = work.popitem() if rng.random() < 0.5 else (t := min(work), work.pop(t))
          if rng.random() < 0.1:
            buffer.fail_group(ticket, "reward")
          else:
            buffer.add_group(make_group(ticket, (*versions, published)))
    except Closed:
      pass

  threads = [threading.Thread(target=sample, args=(seed,), daemon=True) for seed in range(samplers)]
  for thread in threads:
    thread.start()
  lags = []
  for version in range(steps):
    groups = buffer.take_batch(version, timeout=20)
    lags += [version - int(v) for g in groups for c in g.completions for v in c.versions[c.mask]]
    time.sleep(1e-3)
    published = version + 1
  with pytest.raises(EndOfData):
    buffer.take_batch(steps)
  buffer.close()
  for thread in threads:
    thread.join(timeout=20)
    assert not thread.is_alive()
  assert min(lags) >= 0
  assert max(lags) <= max_lag
  assert buffer.count_groups()["trained"] == steps * groups_per_step
  assert buffer.count_groups()["pending"] == 0


def test_end_of_data_starts_no_group_that_cannot_be_trained():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=5, limit=7)
  assert submit_all(buffer, 0) == [0, 1, 2, 3, 4, 5]  # the seventh would be alone
  for ticket in range(6):
    buffer.add_group(make_group(ticket))
  assert [tickets(buffer.take_batch(v, timeout=0)) for v in range(3)] == [[0, 1], [2, 3], [4, 5]]
  with pytest.raises(EndOfData):
    buffer.take_batch(3)
  assert submit_all(buffer, 3) == []


def test_failures_at_the_end_of_data_leave_the_rest_in_the_buffer():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=1, limit=4)
  assert submit_all(buffer, 0) == [0, 1, 2, 3]
  buffer.fail_group(0, "reward process died")
  buffer.fail_group(3, "reward process died")
  buffer.add_group(make_group(1))
  buffer.add_group(make_group(2))
  assert tickets(buffer.take_batch(0)) == [1, 2]
  with pytest.raises(EndOfData):
    buffer.take_batch(1)
  assert buffer.count_failures() == {"reward process died": 2}

  buffer = RolloutBuffer(groups_per_step=2, max_lag=0, limit=3)
  assert submit_all(buffer, 0) == [0, 1]
  buffer.add_group(make_group(0))
  buffer.fail_group(1, "reward process died")
  assert submit_all(buffer, 0) == [2]
  buffer.fail_group(2, "reward process died")
  with pytest.raises(EndOfData, match="with 1 groups left"):
    buffer.take_batch(0)
  assert tickets(buffer.groups()) == [0]


def test_waiting_sampler_is_told_of_newer_weights():
  buffer = RolloutBuffer(groups_per_step=1, max_lag=0)
  (ticket,) = submit_all(buffer, 0)
  buffer.add_group(make_group(ticket))
  buffer.take_batch(0)
  assert buffer.wait_submit(0, timeout=0) is None
  results = []
  thread = threading.Thread(target=lambda: results.append(buffer.wait_submit(0)), daemon=True)
  thread.start()
  with pytest.raises(TimeoutError):
    buffer.take_batch(1, timeout=0)
  thread.join(timeout=10)
  assert results == [None]
  assert buffer.wait_submit(1) == 1


def test_close_wakes_all_waiters_with_the_cause():
  buffer = RolloutBuffer(groups_per_step=1, max_lag=0)
  buffer.try_submit(0)
  caught = {}

  def wait(name, call):
    try:
      call()
    except Exception as error:
      caught[name] = error

  threads = [
    threading.Thread(target=wait, args=("learner", lambda: buffer.take_batch(0)), daemon=True),
    threading.Thread(target=wait, args=("sampler", lambda: buffer.wait_submit(0)), daemon=True),
  ]
  for thread in threads:
    thread.start()
  cause = FloatingPointError("the sampler broke")
  buffer.close(cause)
  buffer.close(KeyError("a later error"))
  for thread in threads:
    thread.join(timeout=10)
  assert caught["learner"] is cause
  assert caught["sampler"] is cause
  with pytest.raises(FloatingPointError):
    buffer.add_group(make_group(0))
  with pytest.raises(FloatingPointError):
    buffer.try_submit(0)
  assert buffer.state()["pending"]["ticket"].tolist() == [0]  # still there to be saved


def test_replay_takes_the_recorded_tickets():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=1)
  assert submit_all(buffer, 0) == [0, 1, 2, 3]
  for ticket in range(3):
    buffer.add_group(make_group(ticket))
  with pytest.raises(TimeoutError):
    buffer.take_batch(0, timeout=0, tickets=[3, 1])
  buffer.add_group(make_group(3))
  assert tickets(buffer.take_batch(0, tickets=[3, 1])) == [1, 3]
  assert submit_all(buffer, 1) == [4, 5]
  buffer.add_group(make_group(4, (1,)))
  with pytest.raises(ValueError, match=r"training groups \[2, 4\] at step 1 breaks max_lag=1"):
    buffer.take_batch(1, tickets=[2, 4])
  assert tickets(buffer.take_batch(1, tickets=[0, 2])) == [0, 2]


def test_waiting_takes_nothing():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=0, steps=1)
  assert submit_all(buffer, 0) == [0, 1]
  buffer.add_group(make_group(0))
  with pytest.raises(TimeoutError, match="1 groups complete"):
    buffer.wait_for_batch(0, timeout=0)
  buffer.add_group(make_group(1))
  buffer.wait_for_batch(0, timeout=0)
  assert tickets(buffer.take_batch(0, timeout=0)) == [0, 1]
  with pytest.raises(EndOfData):
    buffer.wait_for_batch(1, timeout=0)


def test_misuse_is_refused():
  with pytest.raises(ValueError, match=r"\*groups_per_step\* must be at least 0, got groups_per_step=-1"):
    RolloutBuffer(-1, 1)
  with pytest.raises(ValueError, match=r"\*max_lag\* must be at least 0, got max_lag=-1"):
    RolloutBuffer(1, -1)
  with pytest.raises(ValueError, match="give 3 groups, which cannot fill one step of groups=4; raise epochs"):
    RolloutBuffer(4, 1, limit=3)
  buffer = RolloutBuffer(1, 1)
  with pytest.raises(ValueError, match="sampler_version=1, but the learner has only made versions 0 to 0"):
    buffer.try_submit(1)
  with pytest.raises(ValueError, match="no group with ticket 0"):
    buffer.fail_group(0, "reward")
  buffer.try_submit(0)
  with pytest.raises(ValueError, match="token of version -1"):
    buffer.add_group(make_group(0, (NO_VERSION,)))
  with pytest.raises(ValueError, match=r"take_batch\(1\) out of turn"):
    buffer.take_batch(1)


def test_the_buffer_of_a_process_that_samples_nothing_has_every_batch_at_once():
  buffer = RolloutBuffer(groups_per_step=0, max_lag=1, steps=2, limit=8)
  for version in range(2):
    assert buffer.try_submit(version) is None
    assert buffer.take_batch(version, timeout=0) == []
  other = RolloutBuffer(groups_per_step=0, max_lag=1, steps=4, limit=8)
  sampler = RolloutBuffer(groups_per_step=4, max_lag=1, steps=4, limit=8)
  assert other.redeal([buffer.state(), sampler.state()]) == 0
  buffer.close()
  with pytest.raises(Closed):
    buffer.take_batch(2)
