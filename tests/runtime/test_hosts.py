"""A run of two processes as one JAX job: every process samples and learns on its own devices."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
from bucket_server import running_server
from hosts_program import KILLED
from hosts_program import RUNS
from hosts_program import SIZES
from hosts_program import STEPS
from hosts_program import finish
from hosts_program import start
from tiny import tiny

from async_rl import recording
from async_rl import rollout
from async_rl import runtime
from async_rl import tasks
from async_rl._paths import as_path
from async_rl.rollout._conversations import ScoredGroup
from async_rl.runtime import _join
from async_rl.runtime import _step_log
from async_rl.runtime._gather import gather_scored
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Prompt
from async_rl.types import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def killed():
  """The folder of the run `killed`, in a bucket."""
  server = running_server()
  path = server.make_bucket().path("runs/killed")
  with pytest.MonkeyPatch.context() as patch:
    for name, value in {**server.environment, KILLED: path}.items():
      patch.setenv(name, value)
    yield path


@pytest.fixture(scope="module")
def results(folder, killed):
  """What each of the two processes saw, by run."""
  finish(start("runs", folder), 0, 0)
  return [json.loads((folder / f"results_{i}.json").read_text()) for i in range(2)]


def metrics(folder, name):
  return list(recording.read_metrics(folder / name / "metrics.jsonl"))


@pytest.mark.parametrize("name", RUNS)
def test_all_processes_train_the_same_groups_and_no_token_is_older_than_the_bound(results, name):
  first, second = (result[name] for result in results)
  options = RUNS[name]
  bound = 0 if options["mode"] == "sync" else options.get("max_lag", 2)
  assert [step["version"] for step in first] == list(range(1, options.get("steps", STEPS) + 1))
  assert [step["tickets"] for step in first] == [step["tickets"] for step in second]
  assert max(step["lag"] for step in (*first, *second)) <= bound
  for step in first:
    assert [sum(ticket % 2 == i for ticket in step["tickets"]) for i in range(2)] == [2, 2]
  trained = [ticket for step in first for ticket in step["tickets"]]
  assert len(trained) == len(set(trained))


@pytest.mark.parametrize("name", [name for name in RUNS if "fsdp" not in RUNS[name]])
def test_after_every_step_all_processes_have_the_same_parameters(results, name):
  first, second = ([step["checksum"] for step in result[name]] for result in results)
  assert first == second
  assert len(set(first)) == len(first)


@pytest.mark.parametrize("name", RUNS)
def test_the_samplers_of_all_processes_draw_with_the_same_weights(results, name):
  first, second = (result["weights"][name] for result in results)
  both = sorted(set(first) & set(second))
  if name in ("async", "replay", "colocated"):  # a sampler may not have had time for each version
    assert "0" in both
  else:
    assert both == sorted(first) == sorted(second) == (["0", "1"] if name == "stages" else ["0", "1", "2"])
  assert [first[version] for version in both] == [second[version] for version in both]
  assert len({first[version] for version in both}) == len(both)


def test_weights_that_differ_in_one_bit_are_told_before_what_they_drew_is_trained(results):
  for result in results:
    *steps, (message, status) = result["damaged"]
    assert [step["version"] for step in steps] == [1, 2]
    assert re.match(
      r"the processes sampled with different weights of step 2 \(checksums [0-9a-f]{8} in process 0, [0-9a-f]{8} in "
      r"process 1\), so that the memory or a copy of one is damaged; rerun the same command in all processes",
      message,
    )
    assert status == 134


@pytest.mark.parametrize(("name", "other"), [("killed", "whole"), ("replay", "async")])
def test_a_simulated_run_is_the_same_bit_for_bit(results, folder, killed, name, other):
  """Again, killed and resumed, in a bucket; and as the replay of an asynchronous run."""
  assert results[1][name] == results[1][other]
  files = [as_path(killed if run == "killed" else folder / run) / "metrics.jsonl" for run in (name, other)]
  steps = [[r for r in recording.read_metrics(file) if "loss" in r] for file in files]
  for row, expected in zip(*steps, strict=True):
    assert row["loss"] == expected["loss"]
    assert row["grad/norm"] == expected["grad/norm"]


def test_one_process_learns_and_the_other_samples_with_its_weights(results):
  """Killed and resumed, too."""
  learner, sampler = (result["apart"] for result in results)
  assert [step["version"] for step in learner] == [1, 2, 3, 4]
  assert [step["tickets"] for step in learner] == [step["tickets"] for step in sampler]
  assert max(step["lag"] for step in learner) <= RUNS["killed"]["max_lag"]
  sent, drawn_with = (result["weights"]["apart"] for result in results)
  assert list(sent) == ["1", "2", "3", "4"]
  assert list(drawn_with) == ["0", "1", "2"]
  assert [drawn_with[version] for version in ("1", "2")] == [sent[version] for version in ("1", "2")]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
  """The metrics of the run `whole` of one process."""
  run_dir = tmp_path_factory.mktemp("runs") / "one"
  summary = runtime.train(tiny(run_dir=str(run_dir), steps=STEPS, **RUNS["whole"]))
  return list(recording.read_metrics(summary.folder.metrics))


@pytest.mark.parametrize("name", ["whole", "apart"])
def test_the_run_is_that_of_one_process_up_to_rounding(results, folder, of_one_process, name):
  names = {"step", "loss", "grad/norm", "reward/mean", "tokens/trained", "staleness/max"}
  names |= {"eval/accuracy", "eval/interval", "eval/length", "groups/failed", "queue/complete"}
  compared = set()
  for row, expected in zip(metrics(folder, name), of_one_process, strict=True):
    for metric in names & set(expected):
      compared.add(metric)
      np.testing.assert_allclose(row[metric], expected[metric], rtol=1e-4, atol=1e-6, err_msg=metric)
  assert compared == names


def test_the_first_process_alone_writes_what_all_share(results, folder):
  assert [row["step"] for row in metrics(folder, "async")] == [1, 2, 3, 4]
  config = json.loads((folder / "async" / "config.txt").read_text())
  assert config["max_lag"] == 1
  assert "process_id" not in config
  assert (folder / "async" / "report.png").exists()
  schedules = [rollout.read_schedule(folder / "async" / name) for name in ("schedule.jsonl", "schedule_1.jsonl")]
  assert [{event[1] % 2 for event in events if event[0] == "submit"} for events in schedules] == [{0}, {1}]


def test_processes_with_other_options_are_refused_by_name(results, folder):
  for result in results:
    message, status = result["refused"]
    assert message.startswith("process 1 was not started like process 0 (")
    assert "max_lag: 2 -> 3" in message
    assert "groups: 4 -> 8" in message
    assert status == 2
  assert not (folder / "refused").exists()


@pytest.fixture(scope="module")
def stopped(folder):
  """The errors of two processes, of which the second got SIGTERM in its third step."""
  return finish(start("signal", folder), 143, 143)


@pytest.fixture(scope="module")
def lost(stopped, folder):
  """Those of the same command again, when the second process was killed in its sixth step."""
  return finish(start("kill", folder), 134, -9)


def test_a_signal_to_one_process_saves_the_same_step_in_all(stopped):
  for error in stopped:
    assert re.search(r"stopped by SIGTERM after step 3, saved \S+ s after the signal; rerun the same command", error)


def test_the_loss_of_one_process_ends_the_others_with_the_cause(lost):
  assert "resumed at step 3" in lost[0]
  assert re.search(r"error: process 1 on \S+ was lost, silent for \d+ s; rerun the same command in all", lost[0])


def go_on_alone(folder, steps):
  """Continues the run of the command in this process.

  Returns what was written to standard error, the steps in the metrics, and the tickets trained since, by version.
  """
  with contextlib.redirect_stderr(io.StringIO()) as errors:
    runtime.train(tiny(run_dir=str(folder / "command"), mode="async", steps=steps, **SIZES))
  return errors.getvalue(), [row["step"] for row in metrics(folder, "command")], trained(folder, "schedule.jsonl")


def trained(folder, schedule):
  """The tickets that a process of the command trained, by version."""
  events = rollout.read_schedule(folder / "command" / schedule)
  return {event[1]: event[2] for event in events if event[0] == "train"}


@pytest.fixture(scope="module")
def alone(lost, folder):
  """The run of one process that went on from there."""
  return go_on_alone(folder, 8)


@pytest.fixture(scope="module")
def first_lost(alone, folder):
  """Two processes again, of which the first was killed in its third step.

  Returns their errors and the tickets that each trained by version.
  """
  errors = finish(start("kill first", folder), -9, -6)  # -6 is an abort, of status 134
  return errors, [trained(folder, name) for name in ("schedule.jsonl", "schedule_1.jsonl")]


def test_one_process_goes_on_where_two_were(alone):
  errors, steps, tickets = alone
  resumed = re.search(
    r"resumed at step (\d) by 1 processes, saved by 2: unfinished groups, and \d+ complete ones that waited to be "
    "trained, are sampled again",
    errors,
  )
  step = int(resumed[1])
  assert step in (4, 5)  # the checkpoint of step 5 may have been in progress
  assert steps == list(range(1, 9))
  assert {version: len(of_step) for version, of_step in tickets.items()} == dict.fromkeys(range(step, 8), 4)


def test_two_processes_go_on_where_one_was(first_lost):
  errors, tickets = first_lost
  assert "resumed at step 8 by 2 processes, saved by 1: unfinished groups, and 0 complete ones" in errors[0]
  for index, own in enumerate(tickets):
    assert [len(own[version]) for version in (8, 9)] == [2, 2]
    assert {ticket % 2 for ticket in (*own[8], *own[9])} == {index}


def test_the_loss_of_the_first_process_ends_the_others_with_the_cause(first_lost, folder):
  errors, _ = first_lost
  assert "the leader task was preempted/died/restarted unexpectedly" in errors[1]
  error, steps, _ = go_on_alone(folder, 12)
  assert re.search(r"resumed at step (9|10) by 1 processes, saved by 2", error)
  assert steps == list(range(1, 13))


def test_a_process_alone_costs_nothing_and_ends_as_its_work_does():
  hosts = runtime.Hosts()
  assert (hosts.index, hosts.count, hosts.first) == (0, 1, True)
  assert hosts.agree(lambda: "done") == "done"
  assert hosts.gather(b"bytes") == [b"bytes"]
  with pytest.raises(rollout.EndOfData):
    hosts.agree(_end_of_data)
  with runtime.join_hosts(runtime.Devices(coordinator="localhost:1", process_id=0, num_processes=1)) as joined:
    assert joined.count == 1


def _end_of_data():
  raise rollout.EndOfData


def test_scored_groups_arrive_whole_and_in_order():
  prompts = [Prompt(i, f"{i}+{i}=", 2 * i) for i in range(3)]
  completion = Completion(0, 0, np.int32([4, 5]), np.float32([-1, -2]), np.int32([7, 8]), np.array([True, True]), STOP)
  groups = [
    ScoredGroup(
      Request(i, np.arange(i + 1, dtype=np.int32), prompt),
      tuple(completion._replace(ticket=i, sample=k) for k in range(2)),
      (tasks.RewardResult(0.1 * i), tasks.RewardResult(0.0, True, f"timeout after {i} s")),
    )
    for i, prompt in enumerate(prompts)
  ]
  sent = []
  hosts = runtime.Hosts()
  hosts.count = 3
  hosts.gather = lambda data: [*sent, sent.append(data) or data]
  gather_scored(hosts, [], [], prompts)
  gather_scored(hosts, groups[1:2], [3.0, 4.0], prompts)
  found, proxies = gather_scored(hosts, groups[::2], [1.0, 2.0, 5.0, 6.0], prompts)
  assert proxies == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
  assert [(g.request.prompt, g.results) for g in found] == [(g.request.prompt, g.results) for g in groups]
  for group, expected in zip(found, groups, strict=True):
    np.testing.assert_array_equal(group.request.tokens, expected.request.tokens)
    for got, sample in zip(group.completions, expected.completions, strict=True):
      for field, value in sample._asdict().items():
        np.testing.assert_array_equal(getattr(got, field), value)


def test_the_processes_are_found_in_the_environment(monkeypatch):
  assert _join._find_environment() == ("", 1)
  for name, value in dict(JOB_ID="7", STEP_NODELIST="n[1-4]", NTASKS="4", PROCID="2", LOCALID="0").items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  assert _join._find_environment() == ("slurm", 4)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(num_processes=2), "must be given together, got coordinator=None, process_id=None, num_processes=2"),
    (dict(coordinator="host", process_id=0, num_processes=2), r"must be host:port, got coordinator='host'"),
    (dict(coordinator="host:1", process_id=2, num_processes=2), r"\*process_id\* must be an integer .* below 2"),
  ],
)
def test_options_that_name_no_process_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    runtime.Devices(**options)


def test_groups_that_the_processes_cannot_share_are_refused(tmp_path):
  hosts = runtime.Hosts()
  hosts.count = 3
  experiment = tiny(run_dir=str(tmp_path))
  with pytest.raises(ValueError, match=r"\*groups\* must be a multiple of the number of processes, got groups=4 on 3"):
    runtime.Session(experiment, None, None, hosts)


def test_tokens_that_the_loss_rejected_are_dealt_to_the_processes_without_loss():
  parts = np.array([5, 0, 11, 3])
  for total in range(20):
    shares = [_step_log._share(total, parts, i) for i in range(4)]
    assert sum(shares) == total
    assert all(0 <= share <= part for share, part in zip(shares, parts))
  assert _step_log._share(0, np.zeros(2, int), 1) == 0
