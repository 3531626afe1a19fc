"""Many runs in several processes, within a time; the jobs are expressions, which `eval` does."""

import os
import time
from collections import deque

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


def test_at_the_end_of_the_time_what_runs_is_ended_and_nothing_begins_that_would_not_be_done():
  began = time.monotonic()
  jobs = [f"__import__('time').sleep({seconds})" for seconds in (2, 600, 2.0)]
  outcomes = list(run_many(eval, jobs, workers=2, seconds=3.9))
  assert [outcome.job for outcome in outcomes] == jobs[:1]
  assert time.monotonic() - began < 30


def test_jobs_that_follow_from_results_are_done_each_process_on_its_core():
  core, jobs = max(os.sched_getaffinity(0)), deque(["1 + 1"])
  results = []
  for outcome in run_many(eval, jobs, cores=[core]):
    results.append(outcome.result)
    if len(results) == 1:
      jobs += ["__import__('os').sched_getaffinity(0)"]
  assert results == [2, {core}]
  assert not jobs
