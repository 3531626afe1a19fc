"""Many runs in several processes, within a time; the jobs are expressions, which `eval` does."""

import time

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
