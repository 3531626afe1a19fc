"""No token is lost or counted twice, also across a restart."""

import json
import threading

import pytest

from async_rl.rollout._ledger import Ledger


def test_every_token_ends_in_one_account():
  ledger = Ledger()
  ledger.generated(0)
  ledger.generated(100)
  ledger.trained(50, masked={"truncated": 7, "zero std": 3})
  ledger.trained(5, masked={"truncated": 1})
  ledger.failed(10, "reward timeout")
  ledger.stale(2)
  assert ledger.counts() == {
    "generated": 100,
    "trained": 55,
    "masked/truncated": 8,
    "masked/zero std": 3,
    "failed/reward timeout": 10,
    "stale": 2,
    "saved": 22,
  }
  ledger.balance(saved=22)
  with pytest.raises(AssertionError, match=r"22 tokens should be saved, 21 are: .*'trained': 55"):
    ledger.balance(saved=21)
  with pytest.raises(ValueError, match="must be at least 0, got tokens=-1"):
    ledger.trained(-1)


def test_balances_across_a_restart():
  ledger = Ledger()
  ledger.generated(40)
  ledger.trained(10)
  state = json.loads(json.dumps(ledger.state()))

  resumed = Ledger()
  resumed.restore(state, saved=30)
  assert resumed.state() == ledger.state()
  resumed.balance(saved=30)

  resumed = Ledger()
  resumed.restore(state, saved=18)  # 12 tokens of unfinished sequences were not in the checkpoint
  assert resumed.counts()["failed/restart"] == 12
  resumed.balance(saved=18)

  with pytest.raises(ValueError, match="must be at least 0, got tokens=-1"):
    Ledger().restore(state, saved=31)


def test_threads():
  ledger = Ledger()

  def count():
    for _ in range(2000):
      ledger.generated(3)
      ledger.trained(2, masked={"x": 1})

  threads = [threading.Thread(target=count) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert ledger.counts()["generated"] == 24_000
  ledger.balance(saved=0)
