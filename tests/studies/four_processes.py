"""Four processes of two CPU devices make the runs of tests/runtime/test_hosts.py and test_hosts_apart.py.

Command: python tests/studies/four_processes.py    # minutes on four cores

All processes must end with the same parameters after every step. In the runs apart, in which two processes learn and
two sample, the samplers must hold the learners' weights.
"""

import json
import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).parents[1]
sys.path += [str(TESTS.parent), str(TESTS), str(TESTS / "runtime")]

import conftest  # noqa: E402, F401, after the path is set: it has the settings of compilation
from hosts_program import APART  # noqa: E402
from hosts_program import RUNS  # noqa: E402
from hosts_program import finish  # noqa: E402
from hosts_program import start  # noqa: E402

COUNT = 4


def make_runs(scenario):
  """Returns what each process saw of the runs of a scenario."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    finish(start(scenario, folder, COUNT, devices=2), *[0] * COUNT, timeout=1800)
    return [json.loads((folder / f"results_{i}.json").read_text()) for i in range(COUNT)]


def check_apart():
  """Makes the runs in which half of the processes learn and the others sample."""
  results = make_runs("all apart")
  for run in APART:
    for steps in zip(*(result[run] for result in results), strict=True):
      assert len({tuple(step["tickets"]) for step in steps}) == 1, run
    sent, same, *drawn_with = (result["weights"][run] for result in results)
    assert sent == same, run
    for weights in drawn_with:
      assert len(weights) > 1 or run == "async", run
      assert {version: sent.get(version, weights[version]) for version in weights} == weights, run
    print(f"{run}, apart: {len(results[0][run])} steps, the same in {COUNT} processes")
  assert [result["killed"] for result in results] == [result["whole"] for result in results]
  assert [result["replay"] for result in results] == [result["async"] for result in results]


def main():
  check_apart()
  results = make_runs("runs")
  for run, options in RUNS.items():
    for steps in zip(*(result[run] for result in results), strict=True):
      assert len({tuple(step["tickets"]) for step in steps}) == 1, run
      assert sorted(ticket % COUNT for ticket in steps[0]["tickets"]) == list(range(COUNT)), run
      assert "fsdp" in options or len({step["checksum"] for step in steps}) == 1, run
    print(f"{run}: {len(results[0][run])} steps, the same in {COUNT} processes")
  assert [result["killed"] for result in results] == [result["whole"] for result in results]
  assert [result["replay"] for result in results] == [result["async"] for result in results]


if __name__ == "__main__":
  main()
