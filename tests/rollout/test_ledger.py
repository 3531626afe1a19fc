"""No token is lost or counted twice, also across a restart."""

import json
import threading

import pytest

from async_rl.rollout._ledger import Ledger


def test_every_token_ends_in_one_account():
  ledger = Ledger()
  ledger.add_generated(0)
  ledger.add_generated(100)
  ledger.close_trained(50, masked={"truncated": 7, "zero std": 3})
  ledger.close_trained(5, masked={"truncated": 1})
  ledger.close_failed(10, "reward timeout")
  ledger.close_stale(2)
  assert ledger.count_tokens() == {
    "generated": 100,
    "trained": 55,
    "masked/truncated": 8,
    "masked/zero std": 3,
    "failed/reward timeout": 10,
    "stale": 2,
    "saved": 22,
  }
  ledger.check_balance(saved=22)
  with pytest.raises(AssertionError, match=r"22 tokens should be saved, 21 are: .*'trained': 55"):
    ledger.check_balance(saved=21)
  with pytest.raises(ValueError, match="must be at least 0, got tokens=-1"):
    ledger.close_trained(-1)


def test_balances_across_a_restart():
  ledger = Ledger()
  ledger.add_generated(40)
  ledger.close_trained(10)
  state = json.loads(json.dumps(ledger.state()))

  resumed = Ledger()
  resumed.restore(state, saved=30)
  assert resumed.state() == ledger.state()
  resumed.check_balance(saved=30)

  resumed = Ledger()
  resumed.restore(state, saved=18)  # 12 tokens of unfinished sequences were not in the checkpoint
  assert resumed.count_tokens()["failed/restart"] == 12
  resumed.check_balance(saved=18)

  with pytest.raises(ValueError, match="must be at least 0, got tokens=-1"):
    Ledger().restore(state, saved=31)


def test_threads():
  ledger = Ledger()

  def count():
    for _ in range(2000):
      ledger.add_generated(3)
      ledger.close_trained(2, masked={"x": 1})

  threads = [threading.Thread(target=count) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert ledger.count_tokens()["generated"] == 24_000
  ledger.check_balance(saved=0)
