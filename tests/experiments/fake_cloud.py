"""A cloud for tests: `install` makes gcloud, kubectl, xpk, docker and curl of it, and gives them a story to play.

Storage is a folder. Machines and JobSets go through what the story says: a `look` of its list for every copy of the
hosts' logs, or for every question for the JobSet. Every command is recorded.
"""

import json
import os
import pathlib
import shutil
import sys

NAMES = ("gcloud", "kubectl", "xpk", "docker", "curl")
ERRORS = {
  "quota": "ERROR: (gcloud.create) RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPerProjectPerZone' has been exceeded.",
  "capacity": 'ERROR: (gcloud.create) {"code": 8, "message": "There is no more capacity in the zone \\"us-west4-a\\""}',
  "exists": "ERROR: (gcloud.create) ALREADY_EXISTS: Resource already exists.",
  "denied": "ERROR: (gcloud.create) PERMISSION_DENIED: Cloud TPU API has not been used in project p before.",
}


def install(folder, monkeypatch, **story):
  """Puts the cloud on the PATH with a story; returns its folder."""
  folder.mkdir()
  (folder / "story.json").write_text(json.dumps(story))
  for name in NAMES:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(f'#!/bin/sh\nFAKE_CLOUD="{folder}" exec "{sys.executable}" -ISs "{__file__}" {name} "$@"\n')
    program.chmod(0o755)
  monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
  return folder


def calls(folder, *words):
  """Returns the commands that were run, those with all of the words alone."""
  file = folder / "calls"
  lines = file.read_text().splitlines() if file.exists() else []
  return [line for line in lines if all(word in line.split() for word in words)]


class Cloud:
  """The cloud in its folder, as one command finds it and leaves it."""

  def __init__(self, folder):
    self.folder = folder
    self.story = json.loads((folder / "story.json").read_text())
    self.file = folder / "state.json"
    self.state = json.loads(self.file.read_text()) if self.file.exists() else {}
    if self.story.get("existing") and not self.state:
      self.state = {"machines": True, "words": "READY", "waits": 9, "jobset": True}

  def count(self, what):
    """Returns how often this was asked before."""
    before = self.state.get(what, 0)
    self.state[what] = before + 1
    return before

  def save(self):
    self.file.write_text(json.dumps(self.state))

  def path(self, address):
    return self.folder / "bucket" / address.removeprefix("gs://").rstrip("/")

  def play(self, listed, number):
    """Returns an entry of a list of the story; the last one goes on."""
    return listed[min(number, len(listed) - 1)] if listed else None


def fail(message, status=1):
  print(message, file=sys.stderr)
  sys.exit(status)


def storage(cloud, action, *arguments):
  operands = [a for a in arguments if not a.startswith("--")]
  if action == "ls":
    folder = cloud.path(operands[0])
    if not folder.exists():
      fail("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
    print("\n".join(f"{operands[0]}{entry.name}/" for entry in folder.iterdir()))
  elif action == "cp":
    target = cloud.path(operands[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(operands[0], target)
  else:
    source = cloud.path(operands[0])
    look(cloud, source)
    shutil.copytree(source, operands[1], dirs_exist_ok=True, ignore=shutil.ignore_patterns("code.tar.gz"))


def look(cloud, source):
  """Lets the hosts of this attempt leave their logs and states, as the story says."""
  if not cloud.state.get("machines") or not cloud.story.get("attempts"):
    return
  attempt = cloud.play(cloud.story["attempts"], cloud.state["attempt"])
  looks = cloud.count(f"looks {cloud.state['attempt']}")
  scene = cloud.play(attempt, looks)
  for host, (state, line) in scene.get("hosts", {}).items():
    beat = looks if state.startswith(("running", "installing")) and not line.startswith("silent") else 0
    (source / f"{host}.state").write_text(f"{state} {beat}\n")
    with open(source / f"{host}.log", "a") as log:
      log.write(f"{line}\n" if looks < len(attempt) else "")
  cloud.state["words"] = scene.get("machines", cloud.state["words"])


def create(cloud, ready):
  outcome = cloud.play(cloud.story.get("create", ["ok"]), cloud.count("creates"))
  if outcome != "ok":
    fail(ERRORS[outcome])
  cloud.state |= {"machines": True, "words": ready, "attempt": cloud.state.get("attempt", -1) + 1, "waits": 0}
  if "ready" in cloud.story:
    cloud.state["words"] = cloud.story["ready"]


def check_exists(cloud):
  if not cloud.state.get("machines"):
    fail("ERROR: (gcloud.describe) NOT_FOUND: Resource 'rl8' was not found")
  if cloud.story.get("outage") and 2 <= cloud.count("questions") < 5:
    fail("ERROR: (gcloud.describe) Internal error: connection reset")


def words(cloud, waiting):
  """Returns the state of the machines, after they were waited for."""
  if cloud.state["waits"] < cloud.story.get("waits", 1):
    cloud.state["waits"] += 1
    return waiting
  return cloud.state["words"]


def tpu(cloud, kind, action, *arguments):
  queued = kind == "queued-resources"
  if action == "create":
    create(cloud, "ACTIVE" if queued else "READY")
  elif action == "describe":
    check_exists(cloud)
    if queued:
      state = {"state": words(cloud, "WAITING_FOR_RESOURCES")}
      if state["state"] == "FAILED":
        state["failedData"] = {"error": {"message": "the request exceeds the limit"}}
      print(json.dumps({"state": state}))
    else:
      state = "READY" if cloud.state["words"] == "ACTIVE" else words(cloud, "CREATING")
      endpoints = [{"ipAddress": f"10.0.0.{i}"} for i in range(cloud.story.get("hosts", 1))]
      print(json.dumps({"state": state, "networkEndpoints": endpoints}))
  elif action == "delete":
    check_exists(cloud)
    cloud.state["machines"] = False
  elif action == "ssh":
    if cloud.count("ssh") < cloud.story.get("slow", 0):
      fail("Permission denied (publickey). ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [255]: SSH failed", 255)
    (cloud.folder / "ssh").write_text(sys.stdin.read())
    cloud.state["attempt"] = 1
  elif action == "list":
    node = {"name": "p/nodes/rl8", "acceleratorType": "v5litepod-16", "labels": {"async_rl": "rl8"}, "state": "READY"}
    queued_node = {"name": "p/queuedResources/rl8", "state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": [{"node": node}]}}
    mine = queued_node if queued else node
    print(json.dumps([mine, {"name": "p/other", "state": mine["state"]}]))


def compute(cloud, kind, *arguments):
  if kind == "tpus":
    return tpu(cloud, *arguments)
  if kind == "ssh":
    return tpu(cloud, "tpu-vm", "ssh")
  action = arguments[0] if arguments[0] != "managed" else arguments[1]
  if kind == "instances" and action == "list":
    machine = {"labels": {"async_rl": "rl8"}, "machineType": "zones/z/machineTypes/ct6e-standard-4t"}
    machines = [{**machine, "status": "RUNNING"}, {**machine, "status": "TERMINATED"}, {"name": "other"}]
    return print(json.dumps(machines))
  if kind in ("instance-templates", "resource-policies"):
    existed = cloud.state.get(kind)
    cloud.state[kind] = action == "create"
    if action == "create" and existed:
      fail(ERRORS["exists"])
    if action == "delete" and not existed:
      fail(f"ERROR: (gcloud.compute.{kind}.delete) Could not fetch resource: the resource was not found")
    return None
  if action == "create":
    return create(cloud, "RUNNING")
  check_exists(cloud)
  if action == "delete":
    cloud.state["machines"] = False
  elif action == "describe":
    print(json.dumps({"status": words(cloud, "STAGING")}))
  else:
    state = words(cloud, "STAGING")
    member = {"instanceStatus": state, "currentAction": "NONE"}
    if state == "no quota":
      member = {"lastAttempt": {"errors": {"errors": [{"message": "Quota 'TPUS_PER_TPU_FAMILY' exceeded."}]}}}
    count = cloud.story.get("hosts", 1)
    print(json.dumps([{"instance": f"zones/z/instances/rl8-{i}", **member} for i in range(count)]))
  return None


def kubernetes(cloud, action, *arguments):
  if action == "apply":
    (cloud.folder / "applied.json").write_text(sys.stdin.read())
    cloud.state["jobset"] = True
  elif action == "delete":
    cloud.state["jobset"] = False
  elif action == "logs":
    scene = cloud.play(cloud.story["looks"], cloud.state["looked"])
    print("".join(f"{line}\n" for line in scene.get("lines", [])), end="")
  elif arguments[0] == "jobsets":
    spec = {"replicatedJobs": [{"replicas": 2}]}
    names = [{"name": "rl8", "labels": {"async_rl": "rl8"}}, {"name": "other"}]
    print(json.dumps({"items": [{"metadata": name, "spec": spec, "status": {"restarts": 3}} for name in names]}))
  else:
    if not cloud.state.get("jobset"):
      fail('Error from server (NotFound): jobsets.jobset.x-k8s.io "rl8" not found')
    cloud.state["looked"] = cloud.count("jobset looks")
    status = cloud.play(cloud.story["looks"], cloud.state["looked"]).get("status", {})
    labels = {} if "existing" in cloud.story else {"async_rl": "rl8"}
    print(json.dumps({"metadata": {"name": "rl8", "labels": labels}, "status": status}))


def curl(folder, *arguments):
  """The metadata of a machine, and its requests to the bucket with its token."""
  *_, address = arguments
  if address == "https://astral.sh/uv/install.sh":
    find = f'[ "$2" != find ] || echo "{sys.executable}"'
    script = f"echo uv $* in $UV_PYTHON_INSTALL_DIR >&2\n{find}"
    print(f"mkdir -p $UV_INSTALL_DIR; cd $UV_INSTALL_DIR\ncat > uv <<'E'\n#!/bin/sh\n{script}\nE\nchmod +x uv")
    return
  if "metadata.google.internal" in address:
    assert "Metadata-Flavor: Google" in arguments
    known = {"token": '{"access_token":"secret","expires_in":9}', "ip": "localhost"}
    print(known.get(address.rpartition("/")[2]) or os.environ["FAKE_WORKER"])
    return
  assert sys.stdin.read() == "Authorization: Bearer secret\n"
  there = folder / "bucket" / address.removeprefix("https://storage.googleapis.com/")
  if "-T" in arguments:
    there.parent.mkdir(parents=True, exist_ok=True)
    new = there.with_name(f".{os.getpid()}")
    shutil.copyfile(arguments[arguments.index("-T") + 1], new)
    new.replace(there)  # as a whole, like an object
  elif there.exists():
    shutil.copyfile(there, arguments[arguments.index("-o") + 1])
  else:
    fail("curl: (22) The requested URL returned error: 404", 22)


def main(program, *arguments):
  if program == "curl":  # of several hosts at a time
    return curl(pathlib.Path(os.environ["FAKE_CLOUD"]), *arguments)
  cloud = Cloud(pathlib.Path(os.environ["FAKE_CLOUD"]))
  with open(cloud.folder / "calls", "a") as file:
    file.write(" ".join((program, *arguments)).replace("\n", " ") + "\n")
  try:
    if program == "kubectl":
      kubernetes(cloud, *arguments)
    elif program == "xpk":
      cloud.state["jobset"] = arguments[1] == "create"
    elif program == "gcloud" and arguments[0] == "storage":
      storage(cloud, *arguments[1:])
    elif program == "gcloud" and arguments[0] == "compute":
      compute(cloud, *arguments[1:])
  finally:
    cloud.save()
  return None


if __name__ == "__main__":
  main(*sys.argv[1:])
