"""The state of the buffer: saved and restored, also by another number of processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from rollout_helpers import PROMPTS
from rollout_helpers import make_group
from rollout_helpers import submit_all
from rollout_helpers import submit_all_put
from rollout_helpers import tickets

from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._completion_arrays import groups_from_arrays
from async_rl.rollout._completion_arrays import groups_to_arrays


def assert_trees_equal(a, b):
  if isinstance(a, dict | tuple | list):
    assert type(a) is type(b)
    assert len(a) == len(b)
    for x, y in zip(a.items(), b.items()) if isinstance(a, dict) else zip(a, b):
      assert_trees_equal(x, y)
  else:
    np.testing.assert_array_equal(a, b, strict=True)


def test_groups_survive_the_arrays():
  groups = [make_group(7), make_group(3, (0, 1, 2), samples=4), make_group(12, ())]
  assert_trees_equal(groups_from_arrays(groups_to_arrays(groups), PROMPTS), groups)
  assert groups_from_arrays(groups_to_arrays([]), PROMPTS) == []
  assert drawn_tokens(groups[1]) == 12


def test_state_restores_equal_and_gives_pending_tickets_out_again():
  buffer = RolloutBuffer(groups_per_step=2, max_lag=2)
  submit_all(buffer, 0)
  buffer.fail_group(4, "reward")
  for ticket in (1, 3, 5):
    buffer.add_group(make_group(ticket))
  buffer.take_batch(0)
  assert submit_all(buffer, 1) == [6, 7, 8]
  restored = RolloutBuffer(groups_per_step=2, max_lag=2)
  restored.restore(buffer.state(), PROMPTS, in_flight=[2, 7])
  assert_trees_equal(restored.state(), buffer.state())
  assert restored.count_failures() == {"reward": 1}
  with pytest.raises(ValueError, match="no group with ticket 0 is being sampled"):
    restored.add_group(make_group(0, (1,)))  # nobody was asked for it since the restore
  assert submit_all(restored, 1) == [0, 6, 8]
  other = RolloutBuffer(groups_per_step=2, max_lag=1)
  with pytest.raises(ValueError, match="max_lag=2, this run has max_lag=1"):
    other.restore(buffer.state(), PROMPTS)


@settings(max_examples=100, deadline=None)
@given(
  counts=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4),
  max_lag=st.integers(0, 3),
  limit=st.sampled_from([None, 40]),
  seed=st.integers(0, 2**32 - 1),
)
def test_other_numbers_of_processes_deal_every_ticket_once_and_train_it(counts, max_lag, limit, seed):
  """Runs of `counts` processes, each of which continues where the one before was stopped, unfinished groups and all."""
  rng = np.random.default_rng(seed)
  version, trained, states = 0, [], None
  for count in counts:
    buffers = [RolloutBuffer(6 // count, max_lag, limit=limit, first=i, stride=count) for i in range(count)]
    if states is not None:
      forgotten = [buffer.redeal(states) for buffer in buffers]
      assert forgotten == [sum(len(s["complete"]["ticket"]) for s in states)] * count
      assert [buffer.count_groups()["complete"] for buffer in buffers] == [0] * count
    for _ in range(int(rng.integers(0, 4))):
      for buffer in buffers:
        for ticket in submit_all(buffer, version):
          assert ticket % count == buffers.index(buffer)
          if rng.random() < 0.1:
            buffer.fail_group(ticket, "reward")
            trained.append(ticket)
          else:
            buffer.add_group(make_group(ticket, (version,)))
      try:
        for buffer in buffers:
          submit_all_put(buffer, version)
          buffer.wait_for_batch(version, timeout=0)
      except EndOfData:
        break
      for buffer in buffers:
        trained += tickets(buffer.take_batch(version, timeout=0))
      version += 1
    states = [buffer.state() for buffer in buffers]
    assert {s["taken"] for s in states} == {version}
  assert len(trained) == len(set(trained))
  unseen = set().union(*(set(s[n]["ticket"].tolist()) for s in states for n in ("pending", "complete")))
  unseen = unseen.union(*(s["returned"].tolist() for s in states))
  dealt = {t for i, s in enumerate(states) for t in range(i, s["next_ticket"], len(states))}
  assert dealt <= unseen | set(trained) | set(range(limit or 0, max(dealt, default=0) + 1))
  assert unseen.isdisjoint(trained)
  other = RolloutBuffer(5, max_lag)
  with pytest.raises(ValueError, match="groups=6, this run has groups=5"):
    other.redeal(states)
