"""Runs in which some processes only learn and the others only sample; a short one is among those of test_hosts.py."""

import json
import re
from types import SimpleNamespace

import pytest
from hosts_program import APART
from hosts_program import SIZES
from hosts_program import STEPS
from hosts_program import finish
from hosts_program import start
from tiny import tiny

from async_rl import recording
from async_rl import rollout
from async_rl import runtime
from async_rl.runtime._roles import assign_roles
from experiments._runs import load_experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def results(folder):
  """What the process that learns and the one that samples saw, by run."""
  finish(start("all apart", folder), 0, 0)
  return [json.loads((folder / f"results_{i}.json").read_text()) for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_the_sampler_draws_with_the_weights_of_the_learner_and_no_token_is_older_than_the_bound(results, name):
  learner, sampler = (result[name] for result in results)
  options = APART[name]
  assert [step["version"] for step in learner] == list(range(1, options.get("steps", STEPS) + 1))
  assert [step["tickets"] for step in learner] == [step["tickets"] for step in sampler]
  assert max(step["lag"] for step in learner) <= (0 if options["mode"] == "sync" else options["max_lag"])
  sent, drawn_with = (result["weights"][name] for result in results)
  both = set(sent) & set(drawn_with)
  assert {"0"} | both == set(drawn_with)
  assert both
  assert {drawn_with[version] for version in both} == {sent[version] for version in both}
  assert len(set(sent.values())) == len(sent)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [("killed", "whole"), ("replay", "async")])
def test_a_simulated_run_is_the_same_bit_for_bit(results, folder, name, other):
  """Killed and resumed; and as the replay of an asynchronous run."""
  assert results[0][name] == results[0][other]
  rows = [list(recording.read_metrics(folder / run / "metrics.jsonl")) for run in (name, other)]
  steps = [[(row["loss"], row["grad/norm"]) for row in of_run if "loss" in row] for of_run in rows]
  assert steps[0] == steps[1]
  assert len(steps[0]) == STEPS


@pytest.mark.slow
def test_schedules_tell_who_sampled(results, folder):
  learner, sampler = (rollout.read_schedule(folder / "async" / name) for name in ("schedule.jsonl", "schedule_1.jsonl"))
  assert {event[0] for event in learner} == {"weights", "train"}
  assert [event[1] for event in sampler if event[0] == "submit"] == list(range(4 * STEPS))


@pytest.mark.slow
def test_a_signal_to_the_process_that_samples_saves_both_and_any_shape_resumes(folder):
  for error in finish(start("signal apart", folder), 143, 143):
    assert re.search(r"stopped by SIGTERM after step 3, saved \S+ s after the signal", error)
  summary = runtime.train(tiny(run_dir=str(folder / "command"), mode="async", steps=5, **SIZES))
  assert summary.version == 5
  errors = finish(start("kill apart", folder), 134, -9)
  assert "resumed at step 5 by 2 processes, saved by 1" in errors[0]
  assert json.loads((folder / "command" / "config.txt").read_text())["generation_hosts"] == 1
  assert load_experiment(folder / "command").make_meshes().samplers == ()  # what evaluates is one process
  assert re.search(r"error: process 1 on \S+ was lost, silent for \d+ s; rerun the same command in all", errors[0])
  summary = runtime.train(tiny(run_dir=str(folder / "command"), mode="async", steps=7, **SIZES))
  tickets = [
    ticket for event in rollout.read_schedule(summary.folder.schedule) if event[0] == "train" for ticket in event[2]
  ]
  assert len(tickets) == len(set(tickets))
  assert [row["step"] for row in recording.read_metrics(summary.folder.metrics)] == list(range(1, 8))


def hosts_of(count):
  """Stand-ins for the processes of a run, of which this is the first."""
  hosts = runtime.Hosts()
  hosts.count = count
  return hosts


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(groups=5), r"\*groups\* must be a multiple of the number of processes that sample, got groups=5 on 2"),
    (dict(scorer=lambda inputs: None), "must be where samples are drawn, .* give generation_hosts=0"),
  ],
)
def test_what_processes_apart_cannot_do_is_refused(tmp_path, monkeypatch, options, message):
  monkeypatch.setattr(runtime.Experiment, "make_meshes", lambda self: SimpleNamespace(samplers=(1, 2)))
  experiment = tiny(run_dir=str(tmp_path), generation_hosts=2, **options)
  with pytest.raises(ValueError, match=message):
    assign_roles(experiment, hosts_of(3))


def test_roles_by_the_split_of_the_devices(tmp_path, monkeypatch):
  experiment = tiny(run_dir=str(tmp_path))
  roles = assign_roles(experiment, hosts_of(2))
  assert (roles.learners, roles.samplers, roles.apart) == ((0, 1), (0, 1), False)
  monkeypatch.setattr(runtime.Experiment, "make_meshes", lambda self: SimpleNamespace(samplers=(1, 2)))
  roles = assign_roles(experiment, hosts_of(3))
  assert (roles.learners, roles.samplers, roles.apart) == ((0,), (1, 2), True)
  assert (roles.learns, roles.samples) == (True, False)
  assert [roles.sampler_of(ticket) for ticket in range(4)] == [1, 2, 1, 2]
