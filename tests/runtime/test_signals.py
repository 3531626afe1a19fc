"""SIGTERM and Ctrl-C: answered at once, obeyed between two chunks of work, saved, and resumed by the same command."""

import collections
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from runtime_helpers import assert_identical
from runtime_helpers import rows
from runtime_helpers import run
from tiny import tiny

from async_rl import recording
from async_rl import rollout
from async_rl import runtime
from async_rl import sampling
from async_rl.runtime import _session
from async_rl.runtime import _signals

pytestmark = pytest.mark.usefixtures("two_devices")
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def _usual_handlers():
  """Also where the tests run in the background or under nohup, which ignore some signals."""
  usual = (signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL)
  kept = [signal.signal(number, handler) for (number, _), handler in zip(SIGNALS, usual, strict=True)]
  yield
  for (number, _), handler in zip(SIGNALS, kept, strict=True):
    signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_is_answered_at_once_and_obeyed_at_the_next_check(capsys, number, status):
  stop = _signals.StopSignal()
  before = [signal.getsignal(n) for n, _ in SIGNALS]
  with stop.caught(), stop.deferred():
    stop.check()
    stop.activity = "training step 3"
    os.kill(os.getpid(), number)
    with pytest.raises(_signals.StopRequested):
      stop.check()
  assert f"{number.name} received while training step 3: the run is saved after" in capsys.readouterr().err
  assert stop.interrupted("after step 3").status == status
  assert [signal.getsignal(n) for n, _ in SIGNALS] == before


def test_a_second_ctrl_c_does_what_it_did_before():
  stop = _signals.StopSignal()
  with stop.caught(), stop.deferred():
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


#: Waits for a signal as a run does, then reports on its terminal and, in a file, how it ended.
WAITING = """
import fcntl, pathlib, sys, termios, time
from async_rl.runtime import _signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
stop = _signals.StopSignal()
with stop.caught(), stop.deferred():
  print("ready", flush=True)
  try:
    while True:
      stop.check()
      time.sleep(0.01)
  except _signals.StopRequested:
    print("saving", file=sys.stderr, flush=True)
    print("saved", flush=True)
    pathlib.Path(sys.argv[1]).write_text(str(stop.interrupted("now").status))
"""


def test_a_run_whose_terminal_is_closed_saves(tmp_path):
  master, slave = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, "-c", WAITING, str(tmp_path / "status")],
    stdin=slave,
    stdout=slave,
    stderr=slave,
    start_new_session=True,
  )
  os.close(slave)
  assert os.read(master, 100).strip() == b"ready"
  os.close(master)
  assert process.wait(60) == 0
  assert (tmp_path / "status").read_text() == "129"


def test_nohup_keeps_its_meaning():
  ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    stop = _signals.StopSignal()
    with stop.caught(), stop.deferred():
      os.kill(os.getpid(), signal.SIGHUP)
      stop.check()
  finally:
    signal.signal(signal.SIGHUP, ignored)


def send_in(patch, owner, name, number, when):
  """Sends a signal to this process in the call of a method for which `when(object, count of calls)` is true."""
  method, count = getattr(owner, name), 0

  def wrapped(self, *args, **options):
    nonlocal count
    count += 1
    if when(self, count):
      os.kill(os.getpid(), number)
    return method(self, *args, **options)

  patch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
  ("mode", "number", "status"),
  [("simulated", *SIGNALS[0]), pytest.param("sync", *SIGNALS[1], marks=pytest.mark.slow)],
)
def test_a_signal_while_groups_are_sampled_stops_between_two_chunks(tmp_path, monkeypatch, mode, number, status):
  make = lambda name: tiny(run_dir=str(tmp_path / name), mode=mode, decode_chunk=2, steps=4)
  _, whole, host = run(make("whole"))
  chunks = []
  with monkeypatch.context() as patch:
    in_third_chunk = lambda actor, _: actor.version == 1 and (chunks.append(actor.version) or len(chunks) == 3)
    send_in(patch, rollout.Actor, "decode_chunk", number, in_third_chunk)
    with pytest.raises(runtime.Interrupted, match=r"after step 1, saved \d+\.\d s after the signal; rerun") as stopped:
      runtime.train(make("stopped"))
  assert stopped.value.status == status
  assert len(chunks) == 3
  summary, resumed, resumed_host = run(make("stopped"))
  assert [r["step"] for r in rows(summary)] == [1, 2, 3, 4]
  if mode == "simulated":  # what was being sampled is sampled again
    assert_identical(whole, resumed)
    assert resumed_host["ledger"]["ended"].pop("failed/restart") > 0
    assert resumed_host["ledger"]["ended"] == host["ledger"]["ended"]


def test_a_signal_in_an_asynchronous_run_keeps_what_is_in_flight(tmp_path, monkeypatch):
  experiment = tiny(run_dir=str(tmp_path), mode="async", decode_chunk=2, steps=4)
  with monkeypatch.context() as patch:
    send_in(patch, _session.Session, "step", signal.SIGTERM, lambda session, _: session.version == 1)
    with pytest.raises(runtime.Interrupted, match="after step 2"):
      runtime.train(experiment)
  summary = runtime.train(experiment)
  assert [r["step"] for r in rows(summary)] == [1, 2, 3, 4]
  trained = [t for e in rollout.read_schedule(summary.folder.schedule) if e[0] == "train" for t in e[2]]
  assert len(trained) == len(set(trained)) == 4 * 4


def test_a_signal_while_a_chunk_completes_a_group_does_not_lose_it(tmp_path, monkeypatch):
  experiment = tiny(run_dir=str(tmp_path), mode="async", decode_chunk=2, steps=2)
  take, step, sessions, finished = _session.Session.take_batch, sampling.Engine.step, [], collections.Counter()
  asked, completed = threading.Event(), threading.Event()

  def chunk(engine):
    assert asked.wait(60)
    completions = step(engine)
    finished.update(completion.ticket for completion in completions)
    if 2 in finished.values() and not completed.is_set():
      completed.set()
      for _ in range(100):  # until the run is closed, which it must not be while a chunk is decoded
        time.sleep(0.0 if sessions[0].buffer.closed else 0.01)
    return completions

  def signalled(session, tickets=None):
    sessions.append(session)
    asked.set()
    assert completed.wait(60)
    session.stop.request()
    return take(session, tickets)

  with monkeypatch.context() as patch:
    patch.setattr(sampling.Engine, "step", chunk)
    patch.setattr(_session.Session, "take_batch", signalled)
    with pytest.raises(runtime.Interrupted, match="after step 0"):
      runtime.train(experiment)
  assert runtime.train(experiment).version == 2


def test_a_signal_in_an_evaluation_stops_between_two_chunks_and_evaluates_again(tmp_path, monkeypatch):
  options = dict(steps=4, decode_chunk=2, eval_prompts=4, eval_every=2)
  make = lambda name: tiny(run_dir=str(tmp_path / name), **options)
  whole = runtime.train(make("whole"))
  chunks = []
  with monkeypatch.context() as patch:
    greedy = lambda engine: engine._config.temperature == 0
    at = lambda engine, _: greedy(engine) and (chunks.append(engine) or len(chunks) == 2)
    send_in(patch, sampling.Engine, "step", signal.SIGTERM, at)
    with pytest.raises(runtime.Interrupted, match="after step 0"):
      runtime.train(make("stopped"))
  assert len(chunks) == 2
  resumed = runtime.train(make("stopped"))
  evaluated = lambda summary: [r for r in recording.read_metrics(summary.folder.metrics) if "eval/accuracy" in r]
  assert evaluated(resumed) == evaluated(whole)
  assert [r["step"] for r in evaluated(resumed)] == [0, 2, 4]


def test_a_signal_in_a_warm_start_ends_it_and_the_same_command_starts_again(tmp_path):
  mark = tmp_path / "started"

  def start(stage):
    if not mark.exists():
      mark.touch()
      os.kill(os.getpid(), signal.SIGTERM)

  experiment = tiny(run_dir=str(tmp_path / "run"), decode_chunk=2, steps=1, start=start)
  with pytest.raises(runtime.Interrupted, match="stopped by SIGTERM while starting; rerun") as stopped:
    runtime.train(experiment)
  assert stopped.value.status == 143
  assert runtime.train(experiment).version == 1
