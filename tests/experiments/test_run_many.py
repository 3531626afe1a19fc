"""Many runs in several processes, within a time; the jobs are expressions, which `eval` does."""

import os
from collections import deque

import pytest

from experiments.reproductions import _run_many
from experiments.reproductions._run_many import run_many


def test_failures_and_deaths_cost_their_own_job_only():
  jobs = ["1 / 0", "__import__('os')._exit(3)", "2 + 3", "__import__('os').environ['XLA_PYTHON_CLIENT_MEM_FRACTION']"]
  found = {outcome.job: outcome for outcome in run_many(eval, jobs, workers=2)}
  assert set(found) == set(jobs)
  assert "ZeroDivisionError" in found["1 / 0"].error
  assert found[jobs[1]].error == "its process died with status 3"
  assert found["2 + 3"].result == 5
  assert not found["2 + 3"].error
  assert found[jobs[3]].result == "0.450"


class Clock:
  """A clock that stands at `now` and moves by `step` with every reading, however slow the machine is."""

  now, step = 0.0, 0.0

  def monotonic(self):
    self.now += self.step
    return self.now


def test_at_the_end_of_the_time_what_runs_is_ended_and_nothing_begins_that_would_not_be_done(tmp_path, monkeypatch):
  clock = Clock()
  monkeypatch.setattr(_run_many, "time", clock)
  file = tmp_path / "process"
  begins = f"open({str(file)!r}, 'w').write(str(__import__('os').getpid()))"
  has_begun = f"__import__('pathlib').Path({str(file)!r}).exists() and __import__('os').path.getsize({str(file)!r}) > 0"
  first = f"[__import__('time').sleep(0.01) for _ in iter(lambda: {has_begun}, True)] and None"
  endless = f"({begins}, __import__('time').sleep(600))"
  jobs = deque([first, endless, "1 + 1"])
  found = []
  for outcome in run_many(eval, jobs, workers=2, seconds=1000.0):
    found.append(outcome)
    clock.now, clock.step = 1000.0 - outcome.seconds / 2, outcome.seconds / 8  # half of what the shortest took is left
  assert [(outcome.job, outcome.error) for outcome in found] == [(first, "")]
  assert list(jobs) == ["1 + 1"]
  with pytest.raises(ProcessLookupError):
    os.kill(int(file.read_text()), 0)


def test_jobs_that_follow_from_results_are_done_each_process_on_its_core():
  core, jobs = max(os.sched_getaffinity(0)), deque(["1 + 1"])
  results = []
  for outcome in run_many(eval, jobs, cores=[core]):
    results.append(outcome.result)
    if len(results) == 1:
      jobs += ["__import__('os').sched_getaffinity(0)"]
  assert results == [2, {core}]
  assert not jobs


def test_fewer_cores_than_processes_are_refused():
  with pytest.raises(ValueError, match=r"one for each of 2 workers, got cores=\[0\]"):
    next(run_many(abs, [1, 2], workers=2, cores=[0]))
