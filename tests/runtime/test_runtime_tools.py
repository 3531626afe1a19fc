"""Runs of a task with a tool: whole ones, repeated ones, and ones whose tool misbehaves."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from talking import Talking
from tiny import Tiny

from async_rl import runtime
from async_rl.runtime import _run


@dataclasses.dataclass(frozen=True)
class Talk(Tiny):
  """Conversations of up to three turns; a random policy ends most of its turns early."""

  max_completion_tokens: int = 28
  max_turns: int = 3
  slow: tuple[int, ...] = ()
  hangs: tuple[int, ...] = ()
  raises: tuple[int, ...] = ()
  says: str | None = None

  def task(self):
    folder = pathlib.Path(self.run_dir).parent / "data"
    options = dict(slow=self.slow, hangs=self.hangs, raises=self.raises, says=self.says)
    return Talking(numbers=2, train=self.train_prompts, test=8, data_dir=str(folder), **options)


def run(experiment):
  summary = runtime.train(experiment)
  parts = runtime.Parts(experiment)
  store = parts.make_checkpointer(summary.folder.checkpoints)
  state, host = store.restore(parts.learner.abstract())
  store.close()
  rows = [r for r in runtime.read_metrics(summary.folder.metrics) if "reward/mean" in r]
  return rows, jax.device_get(state), host


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_simulated_at_lag_zero_is_sync_bit_for_bit(tmp_path):
  shared = dict(generation_devices=0, max_lag=0, steps=4)
  rows, simulated, host = run(Talk(run_dir=str(tmp_path / "simulated"), reward_workers=1, **shared))
  assert_identical(simulated, run(Talk(run_dir=str(tmp_path / "sync"), mode="sync", **shared))[1])
  assert host["ledger"]["ended"]["trained"] == host["ledger"]["generated"] > 0
  assert host["ledger"]["generated"] == sum(r["tokens/trained"] for r in rows)
  assert all(r["logprob_difference/lag_zero"] < 1e-5 for r in rows)
  assert all(1 < r["tools/turns"] < 3 for r in rows)
  assert all(r["tools/calls"] == 8 * (r["tools/turns"] - 1) for r in rows)
  assert rows[-1]["tools/failures"] == 0


def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path, monkeypatch):
  make = lambda name: Talk(run_dir=str(tmp_path / name), lag="heavy", max_lag=3, checkpoint_every=2)
  rows, whole, host = run(make("whole"))
  learn = _run._Run._learn

  def dies(self, groups):
    if self.version == 5:
      raise KeyboardInterrupt
    learn(self, groups)

  with monkeypatch.context() as patch:
    patch.setattr(_run._Run, "_learn", dies)
    with pytest.raises(KeyboardInterrupt):
      runtime.train(make("killed"))
  resumed_rows, resumed, resumed_host = run(make("killed"))
  assert_identical(whole, resumed)
  assert resumed_host["ledger"] == host["ledger"]
  assert [r["tools/turns"] for r in resumed_rows] == [r["tools/turns"] for r in rows]


def test_async_bounds_the_lag_balances_and_can_be_replayed(tmp_path):
  options = dict(steps=8, max_lag=2, decode_chunk=2)
  rows, state, host = run(Talk(run_dir=str(tmp_path / "async"), mode="async", reward_workers=1, **options))
  assert max(r["staleness/max"] for r in rows) <= 2
  assert host["ledger"]["ended"]["trained"] == sum(r["tokens/trained"] for r in rows)
  schedule = str(tmp_path / "async" / "schedule.jsonl")
  assert sum(event[0] == "answer" for event in runtime.read_schedule(schedule)) > 8
  _, replayed, _ = run(Talk(run_dir=str(tmp_path / "replay"), lag=schedule, **options))
  assert_identical(state.params, replayed.params)
