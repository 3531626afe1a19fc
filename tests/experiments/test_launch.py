"""Launches in a cloud that plays what can happen: every command is the real one, only the cloud is not."""

import json
import time

import fake_cloud
import pytest

from experiments.launch import __main__ as launch
from experiments.launch.__main__ import main

#: The options of every launch of these tests; three looks without a sign of life count as lost.
COMMON = ("--run-dir", "gs://bucket/rl8", "--no-plan")
MACHINES = ("--zone", "us-west4-a", "--project", "p", "--poll-seconds", "0.001", "--silent-minutes", "0.00005")
CLUSTER = ("--cluster", "c", "--location", "us-west4-a", "--image", "me/i:1", "--poll-seconds", "0.001")
BACK_ENDS = {
  "tpu-vm": ("tpu-vm", "quickstart", "--topology", "v5e:2x4", *COMMON, *MACHINES),
  "queued": ("queued", "quickstart", "--topology", "v5e:2x4", "--slices", "2", *COMMON, *MACHINES),
  "gce": ("gce", "quickstart", "--topology", "v6e:2x4", *COMMON, *MACHINES),
  "gce, several hosts": ("gce", "quickstart", "--topology", "v6e:4x4", *COMMON, *MACHINES),
  "xpk": ("xpk", "quickstart", "--topology", "v6e:4x4", *COMMON, *CLUSTER),
  "jobset": ("jobset", "quickstart", "--topology", "v6e:4x4", *COMMON, *CLUSTER),
}
ON_MACHINES = {"tpu-vm": 1, "queued": 2, "gce": 1, "gce, several hosts": 4}
PREEMPTED = {"tpu-vm": "PREEMPTED", "queued": "SUSPENDED", "gce": "TERMINATED", "gce, several hosts": "STOPPING"}


@pytest.fixture
def play(tmp_path, monkeypatch, capfd):
  """Launches in a cloud with a story; returns the exit status, what was printed, and the cloud."""
  monkeypatch.chdir(tmp_path)

  def start(back_end, *options, **story):
    folder = tmp_path / "cloud"
    if not folder.exists():
      story.setdefault("hosts", 4 if "several" in back_end else 1)
      fake_cloud.install(folder, monkeypatch, **story)
    status = main([*BACK_ENDS[back_end], *options])
    printed, errors = capfd.readouterr()
    return status, printed + errors, folder

  return start


def scene(*states, **more):
  """What the hosts leave: their states, with a line of their logs each."""
  return {"hosts": {f"host-{i}": (state, f"line of {state}") for i, state in enumerate(states)}, **more}


def everywhere(back_end, state, **more):
  return scene(*[state] * ON_MACHINES[back_end], **more)


def lines_of(host, printed):
  return [line.partition("] ")[2] for line in printed.splitlines() if line.startswith(f"[host-{host}]")]


@pytest.mark.parametrize("back_end", ON_MACHINES)
def test_a_run_is_followed_and_resumes_after_a_preemption(play, back_end):
  first = [everywhere(back_end, "running 0"), everywhere(back_end, "ended 143", machines=PREEMPTED[back_end])]
  second = [everywhere(back_end, "installing"), everywhere(back_end, "running 0"), everywhere(back_end, "ended 0")]
  status, printed, cloud = play(back_end, attempts=[first, second])
  assert status == 0, printed
  states = ("running 0", "ended 143", "installing", "running 0", "ended 0")
  for host in range(ON_MACHINES[back_end]):
    assert lines_of(host, printed) == [f"line of {state}" for state in states]
  assert "Restart 1 of at most 50: the run resumes from its checkpoint." in printed
  assert "The run is done." in printed
  deletions = 3 if "several" in back_end else 1
  assert len(fake_cloud.calls(cloud, "delete")) == 2 * deletions
  assert "delete" in fake_cloud.calls(cloud)[-1]
  scripts = [cloud.parent / "runs" / "launch" / "rl8" / name / "start.sh" for name in ("0001", "0002")]
  assert [f"STAGING=gs://bucket/rl8-launch/000{i}" in s.read_text() for i, s in enumerate(scripts, 1)] == [True, True]


def test_an_error_in_the_run_ends_it_at_once(play):
  status, printed, cloud = play("tpu-vm", attempts=[[scene("running 0"), scene("ended 1")]])
  assert status == 1
  assert "The run failed with status 1, which a restart would not help." in printed
  assert len(fake_cloud.calls(cloud, "create")) == len(fake_cloud.calls(cloud, "delete")) == 1


def test_copies_of_an_earlier_run_of_the_same_name_count_for_nothing(play, tmp_path):
  old = tmp_path / "runs" / "launch" / "rl8" / "0001" / "old-host.state"
  old.parent.mkdir(parents=True)
  old.write_text("ended 1 0")
  status, _, _ = play("tpu-vm", attempts=[[scene("ended 0")]])
  assert status == 0


def test_an_error_of_one_host_counts_more_than_the_loss_that_it_is_to_the_others(play):
  status, _, cloud = play("tpu-vm", hosts=4, attempts=[[scene("ended 134", "ended 2", "running 0", "running 0")]])
  assert status == 2
  assert len(fake_cloud.calls(cloud, "create")) == 1


def test_half_of_the_workers_dead_is_a_restart(play):
  dead = {"host-0": ("running 0", "line"), "host-1": ("running 0", "silent")}
  attempt = [{"hosts": dead}] * 9
  status, printed, _ = play("tpu-vm", hosts=4, attempts=[attempt, [scene(*["ended 0"] * 4)]])
  assert status == 0
  assert "3 of 4 hosts are lost: host-1 and 2 that never gave a sign of life" in printed


def test_restarts_are_limited(play):
  attempt = [scene("ended 143", machines="PREEMPTED")]
  status, printed, cloud = play("tpu-vm", "--max-restarts", "1", attempts=[attempt])
  assert status == 143
  assert "The run was lost after 1 restarts; the same command resumes it." in printed
  assert len(fake_cloud.calls(cloud, "create")) == len(fake_cloud.calls(cloud, "delete")) == 2


def test_a_quota_that_does_not_suffice_is_one_sentence(play):
  status, printed, cloud = play("tpu-vm", create=["quota"])
  assert status == 2
  assert printed.splitlines()[-1].startswith("error: `gcloud compute tpus tpu-vm create ...` failed: ERROR:")
  assert "'TPUV5sPerProjectPerZone' has been exceeded. (ask for more quota, or take another zone or --spot)" in printed
  assert len(fake_cloud.calls(cloud, "create")) == 1


def test_machines_that_are_not_free_are_waited_for(play):
  status, printed, cloud = play("tpu-vm", create=["capacity", "capacity", "ok"], attempts=[[scene("ended 0")]])
  assert status == 0
  assert printed.count("Not created, trying again: ") == 2
  assert len(fake_cloud.calls(cloud, "create")) == 3


def test_a_failure_to_create_new_machines_after_a_preemption_is_tried_again(play):
  attempts = [[scene("ended 143", machines="PREEMPTED")], [scene("ended 0")]]
  status, printed, cloud = play("tpu-vm", create=["ok", "denied", "ok"], attempts=attempts)
  assert status == 0
  assert printed.count("Not created, trying again: ") == 1
  assert len(fake_cloud.calls(cloud, "create")) == 3


@pytest.mark.parametrize("story", [{"create": ["exists"]}, {"existing": True}])
def test_machines_of_others_are_left_alone(play, story):
  status, printed, cloud = play("tpu-vm", **story)
  assert status == 2
  assert "delete it, or give another --name" in printed
  assert not fake_cloud.calls(cloud, "delete")


def test_a_jobset_of_others_is_left_alone(play):
  status, printed, cloud = play("jobset", existing=True, looks=[{}])
  assert status == 2
  assert "the JobSet rl8 exists, but was not launched from here; give another --name." in printed
  assert not fake_cloud.calls(cloud, "delete")


def test_waiting_for_machines_has_an_end(play):
  status, printed, _ = play("tpu-vm", "--wait-hours", "1e-9", create=["capacity"])
  assert status == 2
  assert "no machines within 1e-09 hours" in printed


def test_another_failure_to_create_is_shown(play):
  status, printed, cloud = play("tpu-vm", create=["denied"])
  assert status == 2
  assert "PERMISSION_DENIED: Cloud TPU API has not been used in project p before." in printed
  assert len(fake_cloud.calls(cloud, "create")) == 1


def test_a_queued_resource_that_is_refused_says_why(play):
  status, printed, cloud = play("queued", ready="FAILED")
  assert status == 2
  assert "there will be no machines: FAILED: the request exceeds the limit" in printed
  assert fake_cloud.calls(cloud, "delete")


def test_a_group_without_quota_says_so(play):
  status, printed, _ = play("gce, several hosts", ready="no quota")
  assert status == 2
  assert "there will be no machines: 4 of 4 machines PENDING; Quota 'TPUS_PER_TPU_FAMILY' exceeded." in printed


def test_a_network_that_fails_for_a_while_ends_nothing(play):
  attempt = [*[scene("running 0")] * 3, scene("ended 0")]
  status, printed, _ = play("tpu-vm", outage=True, attempts=[attempt])
  assert status == 0
  assert printed.count("connection reset") == 3


def test_a_kept_machine_runs_again_by_ssh_that_is_slow(play):
  attempts = [[scene("ended 1")], [scene("running 0"), scene("ended 0")]]
  status, _, cloud = play("tpu-vm", "--keep-machines", attempts=attempts, slow=2)
  assert status == 1
  assert not fake_cloud.calls(cloud, "delete")
  status, printed, _ = play("tpu-vm")
  assert status == 0
  assert "The run of an earlier launch has ended: starting it again on its machines." in printed
  assert len(fake_cloud.calls(cloud, "ssh")) == 3
  assert "STAGING=gs://bucket/rl8-launch/0002" in (cloud / "ssh").read_text()
  assert len(fake_cloud.calls(cloud, "create")) == len(fake_cloud.calls(cloud, "delete")) == 1


def test_the_same_command_follows_a_run_that_goes_on(play, tmp_path, monkeypatch):
  def interrupt(_):
    if fake_cloud.calls(tmp_path / "cloud", "rsync"):
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(time, "sleep", interrupt)
    status, printed, cloud = play("tpu-vm", attempts=[[scene("running 0"), scene("running 0"), scene("ended 0")]])
  assert status == 130
  assert "`python -m experiments.launch delete tpu-vm rl8 ...` ends it." in printed
  status, printed, _ = play("tpu-vm")
  assert status == 0
  assert "The run of an earlier launch goes on: following it (attempt 1)." in printed
  assert len(fake_cloud.calls(cloud, "create")) == 1


@pytest.mark.parametrize("back_end", ["xpk", "jobset"])
def test_a_jobset_is_created_and_followed_over_its_restarts(play, back_end):
  looks = [
    {"status": {}},
    {"status": {}, "lines": ["[pod/rl8-slice-0-0-x] step 1"]},
    {"status": {"restarts": 1}, "lines": ["[pod/rl8-slice-0-0-y] resumed at step 1"]},
    {"status": {"terminalState": "Completed", "restarts": 1}},
  ]
  status, printed, cloud = play(back_end, "--build", looks=looks)
  assert status == 0
  assert "step 1\nRestart 1 of at most 50: the run resumes from its checkpoint.\n" in printed
  assert "resumed at step 1\nThe run is Completed" in printed
  programs = [line.split()[:2] for line in fake_cloud.calls(cloud)]
  created = ["xpk", "workload"] if back_end == "xpk" else ["kubectl", "apply"]
  assert programs[:5] == [["gcloud", "container"], ["kubectl", "get"], ["docker", "build"], ["docker", "push"], created]
  assert not fake_cloud.calls(cloud, "delete")


def test_a_jobset_that_failed_is_an_error_and_made_again_by_the_next_launch(play):
  failed = {"type": "Failed", "status": "True", "message": "jobset failed due to a pod failure policy"}
  status, printed, cloud = play("jobset", looks=[{"status": {"conditions": [failed]}}])
  assert status == 1
  assert "The run is Failed: jobset failed due to a pod failure policy" in printed
  status, printed, _ = play("jobset", "--delete-jobset")
  assert status == 1
  assert "The run of an earlier launch is Failed: starting it again." in printed
  assert len(fake_cloud.calls(cloud, "kubectl", "delete")) == 2


@pytest.mark.parametrize(
  ("back_end", "row"),
  [
    ("tpu-vm", ["rl8", "v5litepod-16", "READY"]),
    ("queued", ["rl8", "v5litepod-16", "ACTIVE"]),
    ("gce", ["rl8", "2", "x", "ct6e-standard-4t", "1", "RUNNING,", "1", "TERMINATED"]),
    ("jobset", ["rl8", "2", "slices", "running,", "3", "restarts"]),
  ],
)
def test_the_list_has_what_was_launched_alone(tmp_path, monkeypatch, capfd, back_end, row):
  fake_cloud.install(tmp_path / "cloud", monkeypatch)
  where = CLUSTER[:4] if back_end == "jobset" else MACHINES[:2]
  assert main(["list", back_end, *where]) == 0
  assert [line.split() for line in capfd.readouterr().out.splitlines()] == [["name", "kind", "state"], row]


@pytest.mark.parametrize("back_end", ["tpu-vm", "queued", "gce", "xpk", "jobset"])
def test_a_run_is_deleted_by_its_name(tmp_path, monkeypatch, capfd, back_end):
  cloud = fake_cloud.install(tmp_path / "cloud", monkeypatch)
  on_cluster = back_end in ("xpk", "jobset")
  where = CLUSTER[:4] if on_cluster else MACHINES[:2]
  (cloud / "state.json").write_text(json.dumps({"machines": True}))
  assert main(["delete", back_end, "rl8", *where]) == 0
  assert "rl8 is deleted." in capfd.readouterr().out
  assert all("rl8" in line for line in fake_cloud.calls(cloud, "delete"))
  if not on_cluster:
    assert main(["delete", back_end, "rl8", *where]) == 0
    assert "There is no rl8." in capfd.readouterr().out


@pytest.mark.parametrize(("status", "reason"), [(1, "does not fit on these chips"), (2, "could not be planned")])
def test_what_does_not_fit_is_not_launched(play, tmp_path, monkeypatch, status, reason):
  monkeypatch.setattr(launch, "plan_command", lambda job, more: ("python", "-c", f"raise SystemExit({status})"))
  assert play("tpu-vm", "--plan")[:2] == (
    2,
    f"error: the run {reason}, see above; --no-plan launches it all the same\n",
  )
  assert not fake_cloud.calls(tmp_path / "cloud")


def test_a_cloud_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PATH", str(tmp_path))
  assert main([*BACK_ENDS["tpu-vm"]]) == 2
  assert capfd.readouterr().err.endswith("gcloud is not on the PATH: install the Google Cloud CLI.\n")
