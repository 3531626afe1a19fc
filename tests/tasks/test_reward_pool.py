"""The reward pool: whatever a verifier does costs one sample and nothing else."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time

import misbehaving
import pytest

from async_rl import tasks
from async_rl.types import STOP
from async_rl.types import Prompt


def ask(answer, text="yes"):
  return Prompt(0, "?", answer), text, STOP


def command_lines():
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # of a process that has ended meanwhile
      yield path.read_bytes()


@pytest.fixture(scope="module")
def pool():
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=1, timeout_s=20) as pool:
    yield pool


@pytest.fixture(scope="module")
def hasty():
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=2, timeout_s=0.3, failure_value=-1.0) as pool:
    yield pool


@pytest.mark.parametrize(("text", "value"), [("yes", 1.0), ("no", 0.0)])
def test_value(pool, text, value):
  assert pool.submit(*ask("right", text)).result() == tasks.RewardResult(value)


@pytest.mark.parametrize(
  ("answer", "reason"),
  [
    ("raise", "raised ZeroDivisionError: by zero"),
    ("none", "raised TypeError"),
    ("recurse", "raised RecursionError"),
    ("memory", "raised MemoryError"),
    ("sys.exit", "raised SystemExit: 0"),
    ("nan", "non-finite reward nan"),
    ("huge", "non-finite reward 1e+39"),
    ("huge integer", "raised OverflowError"),
    ("text", "raised ValueError"),
    ("exit", "died with exit status 3"),
  ],
)
def test_failures_cost_one_sample_and_are_counted(pool, answer, reason):
  kind = reason.split()[0]
  before = pool.failures.get(kind, 0)
  result = pool.submit(*ask(answer)).result()
  assert (result.value, result.failed) == (0.0, True)
  assert result.reason.startswith(reason)
  assert pool.failures[kind] == before + 1
  assert pool.submit(*ask("right")).result().value == 1.0


@pytest.mark.parametrize("answer", ["hang", "sleep", "power", "orphan"])
def test_time_limit_kills_and_replaces_the_worker(hasty, answer):
  jobs = [hasty.submit(*ask(what)) for what in ("right", answer, "right", "right")]
  results = [job.result(timeout=60) for job in jobs]
  assert [r.value for r in results] == [1.0, -1.0, 1.0, 1.0]
  assert results[1].reason == "timeout after 0.3 s"
  assert hasty.submit(*ask("right")).result(timeout=60).value == 1.0
  assert not any(b"98765.4321" in line for line in command_lines()), "a child outlived its worker"


def test_workers_import_no_jax_and_are_other_processes(pool):
  assert pool.submit(*ask("modules")).result().value == 0.0
  assert pool.submit(*ask("pid")).result().value != os.getpid()


def test_a_worker_killed_while_idle_is_replaced(pool):
  first = pool.submit(*ask("pid")).result().value
  os.kill(int(first), 9)
  os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)
  second = pool.submit(*ask("pid")).result()
  assert not second.failed
  assert second.value != first


def test_close_ends_everything_at_once():
  pool = tasks.RewardPool(misbehaving.Misbehaving(), workers=1, timeout_s=1000)
  worker = int(pool.submit(*ask("pid")).result().value)
  running, waiting = pool.submit(*ask("hang")), pool.submit(*ask("right"))
  while not running.running():
    time.sleep(0.01)
  start = time.monotonic()
  pool.close()
  pool.close()
  assert time.monotonic() - start < 5
  assert running.result().reason.startswith("closed")
  assert waiting.cancelled()
  with pytest.raises(ProcessLookupError):
    os.kill(worker, 0)
  with pytest.raises(RuntimeError, match="closed"):
    pool.submit(*ask("right"))


def test_workers_end_with_a_trainer_that_is_killed():
  code = (
    "import os, misbehaving; from async_rl import tasks; from async_rl.types import Prompt\n"
    "pool = tasks.RewardPool(misbehaving.Misbehaving(), workers=1, timeout_s=1000)\n"
    "print(int(pool.submit(Prompt(0, '', 'pid'), '', '').result().value), flush=True)\n"
    "future = pool.submit(Prompt(0, '', 'hang'), '', '')\n"
    "while not future.running(): pass\n"
    "os.kill(os.getpid(), 9)"
  )
  path = os.pathsep.join(sys.path)
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
  worker = pathlib.Path("/proc") / done.stdout.strip() / "exe"
  deadline = time.monotonic() + 20
  while os.path.exists(worker):
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_submit_blocks_while_full_and_close_releases_it():
  pool = tasks.RewardPool(misbehaving.Misbehaving(), workers=1, timeout_s=1000, capacity=1)
  running = pool.submit(*ask("hang"))
  while not running.running():
    time.sleep(0.01)
  pool.submit(*ask("right"))
  outcome = []

  def submit_third():
    try:
      pool.submit(*ask("right"))
    except RuntimeError as error:
      outcome.append(str(error))

  thread = threading.Thread(target=submit_third)
  thread.start()
  thread.join(timeout=0.2)
  assert thread.is_alive()
  pool.close()
  thread.join(timeout=10)
  assert "closed" in outcome[0]


def test_a_task_that_cannot_be_loaded_is_an_error_not_a_failed_sample():
  with tasks.RewardPool(misbehaving.Misbehaving(broken=True), workers=1) as pool:
    with pytest.raises(RuntimeError, match="could not load the task: ImportError: no module named 'verifier'"):
      pool.submit(*ask("right")).result(timeout=60)
    with pytest.raises(RuntimeError, match="verifier"):
      pool.submit(*ask("right"))


def test_in_process():
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=0, failure_value=-1.0) as pool:
    assert pool.submit(*ask("right")).result() == tasks.RewardResult(1.0)
    assert pool.submit(*ask("pid")).result().value == os.getpid()
    assert pool.submit(*ask("raise")).result() == (-1.0, True, "raised ZeroDivisionError: by zero")
    assert pool.failures == {"raised": 1}
  with pytest.raises(RuntimeError, match="closed"):
    pool.submit(*ask("right"))


def test_the_first_reason_of_each_kind_is_kept():
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=0) as pool:
    assert pool.first_reasons == ()
    for answer in ("right", "raise", "huge", "nan", "none"):
      pool.submit(*ask(answer)).result()
    pool.respond(Prompt(0, "?", "number"), ["a"]).result()
    assert pool.first_reasons == (
      "reward: raised ZeroDivisionError: by zero",
      "reward: non-finite reward 1e+39",
      "respond: raised TypeError: respond returned int, not a text",
    )


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e39])
def test_a_stand_in_is_finite(value):
  with pytest.raises(ValueError, match="failure_value must be finite in float32, got failure_value="):
    tasks.RewardPool(misbehaving.Misbehaving(), workers=0, failure_value=value)


@pytest.mark.parametrize(
  "options",
  [
    {"workers": -1}, {"workers": 1, "timeout_s": 0}, {"workers": 1, "capacity": 0},
    *({"workers": 1, "timeout_s": x} for x in (1e7, float("inf"), float("nan"))),
  ],
)  # fmt: skip
def test_bad_options(options):
  with pytest.raises(ValueError, match="must be"):
    tasks.RewardPool(misbehaving.Misbehaving(), **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tool_answers_or_not(workers):
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=workers) as pool:
    assert pool.respond(Prompt(0, "?", "echo"), ["a", "b", "c"]).result() == tasks.ToolResult("a b c")
    assert pool.respond(Prompt(0, "?", "last"), ["a"]).result() == tasks.ToolResult(None)


@pytest.mark.parametrize(
  ("answer", "reason"),
  [
    ("raise", "raised ZeroDivisionError: by zero"),
    ("number", "raised TypeError: respond returned int"),
    ("long", "too-long answer of 131072 characters"),
    ("surrogate", "raised UnicodeEncodeError"),
    ("exit", "died with exit status 3"),
  ],
)
def test_a_failing_tool_costs_one_call_and_is_counted_apart(pool, answer, reason):
  kind = reason.split()[0]
  before, rewards = pool.tool_failures.get(kind, 0), pool.failures
  result = pool.respond(Prompt(0, "?", answer), ["a"]).result()
  assert (result.text, result.failed) == (None, True)
  assert result.reason.startswith(reason)
  assert pool.tool_failures[kind] == before + 1
  assert pool.failures == rewards
  assert pool.respond(Prompt(0, "?", "echo"), ["a"]).result().text == "a"


def test_answers_come_in_the_order_of_the_calls():
  with tasks.RewardPool(misbehaving.Misbehaving(), workers=1) as pool:
    calls, done = [pool.respond(Prompt(0, "?", "echo"), [str(i)]) for i in range(5)], []
    for call in calls:
      call.add_done_callback(done.append)
    assert [call.result().text for call in calls] == list("01234")
    assert done == calls


def test_a_hanging_tool_is_killed_and_answers_come_before_rewards(hasty):
  jobs = [hasty.submit(*ask("hang")) for _ in range(4)]  # two of them wait
  calls = [hasty.respond(Prompt(0, "?", what), ["a"]) for what in ("hang", "echo")]
  done = []
  for future in [*jobs, *calls]:
    future.add_done_callback(done.append)
  assert calls[1].result(timeout=60).text == "a"
  assert calls[0].result(timeout=60).reason == "timeout after 0.3 s"
  assert [job.result(timeout=60).value for job in jobs] == [-1.0] * 4
  assert done.index(calls[0]) < done.index(jobs[3])
