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


def test_weights_of_one_version_have_one_checksum_and_a_restart_compares_with_no_damaged_one():
  ledger = Ledger()
  ledger.add_weights(3, 0xC0FFEE)
  ledger.add_weights(3, 0xC0FFEE)
  ledger.add_weights(5, 17)
  assert ledger.weights() == {3: 0xC0FFEE, 5: 17}
  assert ledger.weights(since=4) == {5: 17}
  message = "weights of step 5 have the checksum 00000012, those that it held before have 00000011"
  with pytest.raises(AssertionError, match=message):
    ledger.add_weights(5, 18)

  resumed, merged = Ledger(), Ledger()
  state = json.loads(json.dumps(ledger.state()))
  assert state["weights"] == {"3": 0xC0FFEE, "5": 17}
  resumed.restore(state, saved=0)
  merged.merge([state, state])
  for other in (resumed, merged):
    assert other.weights() == {}
    other.add_weights(5, 18)
    assert other.weights() == {5: 18}
    assert other.state()["weights"] == {"3": 0xC0FFEE, "5": 18}
  for version in range(6, 2000):
    resumed.add_weights(version, version)
  assert min(resumed.weights()) == 1000
  assert "3" not in resumed.state()["weights"]


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
