"""What a launch would run, by back end; what it refuses; its help."""

import dataclasses
import inspect
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from experiments import configs
from experiments.launch import __main__ as launch
from experiments.launch import _commands
from experiments.launch import _job
from experiments.launch import _jobset
from experiments.launch import _machines
from experiments.launch import _pods
from experiments.launch import _script
from experiments.launch._topology import Topology

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "launch"
BACK_ENDS = ("tpu-vm", "queued", "gce", "xpk", "jobset")
WHERE = {
  **dict.fromkeys(BACK_ENDS[:3], ("--zone", "us-west4-a", "--project", "p")),
  **dict.fromkeys(BACK_ENDS[3:], ("--cluster", "c", "--location", "us-west4-a", "--image", "me/rl:1")),
}


def given(back_end, *options, topology="v6e:4x4", config="quickstart"):
  options = ("--run-dir", "gs://bucket/rl8", *options) if "--run-dir" not in options else options
  return [back_end, config, "--topology", topology, *WHERE[back_end], *options]


def parse(back_end, *options, **more):
  _, *arguments = given(back_end, *options, **more)
  return launch.parse(back_end, arguments)[1]


def golden_file(file):
  """Returns the command in the first line of a file, and what it printed then."""
  command, _, printed = file.read_text().partition("\n")
  return shlex.split(command)[3:], printed


def update_golden_files():
  """Writes what the commands print now: `python tests/experiments/test_launch_dry_run.py`."""
  for file in DATA.glob("*.txt"):
    command = file.read_text().partition("\n")[0]
    arguments = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    file.write_text(f"{command}\n{printed}")


@pytest.mark.parametrize("file", sorted(DATA.glob("*.txt")), ids=lambda file: file.stem)
def test_a_dry_run_prints_all_that_would_be_run(file, capsys):
  arguments, expected = golden_file(file)
  assert "--dry-run" in arguments
  assert launch.main(arguments) == 0
  assert capsys.readouterr().out == expected


@pytest.mark.parametrize("file", ["README.md", "experiments/README.md"])
def test_the_commands_of_the_readme_can_be_launched(file, capsys):
  text = (ROOT / file).read_text().replace(" \\\n", " ")
  commands = re.findall(r"(?:`|^    )python -m experiments\.launch ([a-z]\S+ (?:quickstart|gsm8k) [^`\n]*)", text, re.M)
  assert {command.split()[0] for command in commands} == set(BACK_ENDS)
  for command in commands:
    assert launch.main([*shlex.split(command), "--dry-run"]) == 0, command
    assert "experiments.train" in capsys.readouterr().out


def test_every_back_end_has_a_golden_file():
  assert {golden_file(file)[0][0] for file in DATA.glob("*.txt")} == set(BACK_ENDS) == set(launch._BACK_ENDS)


@pytest.mark.parametrize("back_end", ["tpu-vm", "gce"])
def test_the_start_up_script_is_clean(back_end, tmp_path):
  shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
  options = ("--env", "A=it's", "--prepare", "echo 'a b' && true", "--seed", "1")
  machines = parse(back_end, *options)
  script = _script.render_script(machines.job, "gs://b/r/0001", extras="train,tpu", prepare=machines.place.prepare)
  file = tmp_path / "start.sh"
  file.write_text(script)
  found = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
  assert (found.returncode, found.stdout) == (0, "")
  assert max(map(len, script.splitlines())) <= 120


def check(value, schema, where="manifest"):
  """Checks a value against the extract of a schema in the form of OpenAPI."""
  kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
  if "type" in schema:
    assert type(value) is kinds[schema["type"]], f"{where} is no {schema['type']}"
  assert value in schema.get("enum", [value]), f"{where} is {value}"
  if "properties" in schema:
    assert value.keys() >= set(schema.get("required", ())), f"{where} lacks a required field"
    for name, field in value.items():
      assert name in schema["properties"], f"{where} has no field {name}"
      check(field, schema["properties"][name], f"{where}.{name}")
  for item in value if isinstance(value, list) else ():
    check(item, schema["items"], where)


def test_the_jobset_has_its_published_form():
  schema = json.loads((DATA / "jobset_schema.json").read_text())
  pods = parse("jobset", "--spot", "--slices", "2", "--env", "A=1")
  manifest = json.loads(pods.create()[1])
  check(manifest, schema)
  manifest["spec"]["failurePolicy"]["maxRestart"] = manifest["spec"]["failurePolicy"].pop("maxRestarts")
  with pytest.raises(AssertionError, match="failurePolicy has no field maxRestart"):
    check(manifest, schema)


def test_the_jobset_restarts_after_preemptions_alone():
  pods = parse("jobset")
  manifest = _jobset.make_manifest(pods.job, pods.cluster)
  job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
  (rule,) = job["podFailurePolicy"]["rules"]
  assert rule["action"] == "FailJob"
  assert rule["onExitCodes"] == {"containerName": "async-rl", "operator": "NotIn", "values": [42, 134, 137, 143]}
  assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
  assert manifest["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize(
  ("name", "chips", "hosts", "accelerator", "machine"),
  [
    ("v5e:1x1", 1, 1, "v5litepod-1", "ct5lp-hightpu-1t"),
    ("v5e:2x4", 8, 1, "v5litepod-8", "ct5lp-hightpu-8t"),
    ("v5e:16x16", 256, 64, "v5litepod-256", "ct5lp-hightpu-4t"),
    ("v6e:4x4", 16, 4, "v6e-16", "ct6e-standard-4t"),
    ("v5p:2x2x1", 4, 1, "v5p-8", "ct5p-hightpu-4t"),
    ("v5p:4x4x8", 128, 32, "v5p-256", "ct5p-hightpu-4t"),
    ("tpu7x:2x2x2", 8, 2, "tpu7x-16", "tpu7x-standard-4t"),
  ],
)
def test_slices_have_the_names_of_the_cloud(name, chips, hosts, accelerator, machine):
  topology = Topology.parse(name)
  assert (topology.chips, topology.hosts) == (chips, hosts)
  assert (topology.accelerator_type, topology.machine_type) == (accelerator, machine)


def test_a_slice_of_an_unusual_shape_is_named_by_it():
  assert "--accelerator-type=v5p-256" in parse("tpu-vm", topology="v5p:4x4x8").create("start.sh")[0]
  unusual = parse("tpu-vm", topology="v5p:4x4x16").create("start.sh")[0]
  assert {"--type=v5p", "--topology=4x4x16"} < set(unusual)
  assert "--tpu-type=v5p-4x4x16" in parse("xpk", topology="v5p:4x4x16").create()[0]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["tpu-wm"], "unknown back end 'tpu-wm': did you mean 'tpu-vm'"),
    (
      given("tpu-vm", topology="v5e:4x5"),
      "*topology* must name a slice, got topology='v5e:4x5'; those of v5e are",
    ),
    (given("tpu-vm", topology="v5p:4x2x2"), "got topology='v5p:4x2x2'; those of v5p are 2x2x1,"),
    (given("tpu-vm", topology="v5"), "*topology* must be a generation and a shape such as v5e:4x4, got topology='v5'"),
    (given("tpu-vm", topology="tpu7x:2x2x1"), "must be of v5e, v5p or v6e for the Cloud TPU API, got topology=tpu7x"),
    (given("tpu-vm", "--slices", "2"), "*slices* must be 1 for tpu-vm, got slices=2; queued, xpk and jobset take"),
    (given("gce", "--slices", "2"), "*slices* must be 1 for gce, got slices=2; queued, xpk and jobset take"),
    (given("queued", "--slices", "0"), "*slices* must be an integer at least 1, got slices=0."),
    (given("gce", topology="v5e:4x4"), "for a slice of several hosts in gce, got topology=v5e:4x4; queued, xpk and"),
    (given("xpk", topology="v6e:2x2"), "*topology* must have at least 8 chips for xpk, got topology=v6e:2x2; tpu-vm,"),
    (given("xpk", "--spot"), "*spot* must be False for xpk, got spot=True; `xpk cluster create --spot` makes"),
    (given("tpu-vm", "--name", "Rl_8"), "*name* must be at most 28 lowercase letters, digits and hyphens"),
    (given("tpu-vm", "--env", "A"), "*env* must be of the form NAME=VALUE, got env='A'."),
    (given("tpu-vm", "--max-restarts", "-1"), "*max_restarts* must be an integer at least 0, got max_restarts=-1."),
    (given("tpu-vm", "--run-dir", "runs/x"), "*run_dir* must be a folder gs://BUCKET/PATH (or an absolute path that"),
    (given("tpu-vm", "--run-dir", "/mnt/x"), "if all hosts mount it, give --staging gs://... for their code and logs"),
    (given("tpu-vm", config="quikstart"), "unknown config 'quikstart': did you mean 'quickstart'"),
    (given("tpu-vm", "--name", "x", "--seed", "-1"), None),
    (given("tpu-vm", "--poll-seconds", "0"), None),
    (given("tpu-vm", "--staging", "here"), None),
    (given("jobset", "--prepare", "true"), None),
  ],
)
def test_what_cannot_be_launched_is_refused_in_one_sentence(arguments, message, capsys, monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))  # nothing is run
  if message is None:  # as options of other commands are, when they are parsed
    with pytest.raises(SystemExit) as exit_:
      launch.main([*arguments, "--dry-run"])
    assert exit_.value.code == 2
    return
  assert launch.main([*arguments, "--dry-run"]) == 2
  errors = capsys.readouterr().err
  assert errors.startswith("error: ")
  assert errors.count("\n") == 1
  assert message in errors


def test_the_project_is_needed_for_a_group_of_machines(capsys):
  arguments = [a for a in given("gce", "--dry-run") if a not in ("--project", "p")]
  assert launch.main(arguments) == 2
  assert "*project* must be given for a slice of several hosts in gce" in capsys.readouterr().err


def test_a_config_outside_of_the_code_is_refused(tmp_path):
  file = tmp_path / "my_own_config.py"
  file.write_text((ROOT / "experiments" / "configs" / "quickstart.py").read_text())
  with pytest.raises(ValueError, match=r"my_own_config.py must lie below .*experiments: the hosts get nothing else"):
    parse("tpu-vm", config=str(file))
  inside = ROOT / "experiments" / "configs" / "quickstart.py"
  assert launch._path_in_code(str(inside)) == "experiments/configs/quickstart.py"


def test_misspelt_options_are_refused_with_the_right_name(capsys):
  for option, right in (("--slcies", "--slices"), ("--max-lagg", "--max-lag")):
    with pytest.raises(SystemExit) as exit_:
      launch.main(given("tpu-vm", option, "3"))
    assert exit_.value.code == 2
    assert right in capsys.readouterr().err


@pytest.mark.parametrize("name", configs.NAMES)
@pytest.mark.parametrize("back_end", ["tpu-vm", "jobset"])
def test_options_of_launches_and_of_configs_have_different_names(name, back_end):
  target = parse(back_end, "--max-lag", "3", "--spot", config=name)
  assert target.job.training[3:] == (name, "--run-dir", "gs://bucket/rl8", "--max-lag", "3")
  assert target.job.spot


PARTS = {**dict.fromkeys(BACK_ENDS[:3], _machines.Place), **dict.fromkeys(BACK_ENDS[3:], _pods.Image)}
HELP = {name: (launch.Launch, PARTS[name]) for name in BACK_ENDS}
HELP |= {f"{verb} {name}": (PARTS[name].__mro__[1],) for verb in ("list", "delete") for name in BACK_ENDS}


@pytest.mark.parametrize("command", HELP)
def test_help_explains_every_option(command, capsys):
  with pytest.raises(SystemExit) as exit_:
    launch.main([*command.split(), "--help"])
  assert exit_.value.code == 0
  printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
  for part in HELP[command]:
    source = "\n".join(inspect.getsource(kind) for kind in part.__mro__[:-1])
    for field in dataclasses.fields(part):
      comment = re.search(rf"((?:  #: .*\n)+)  {field.name}: ", source)
      assert comment, f"{part} does not explain {field.name}"
      assert f"--{field.name.replace('_', '-')}" in printed
      assert " ".join(line.strip().removeprefix("#: ") for line in comment[1].splitlines()) in printed


def test_help_of_a_config_has_its_options_and_those_of_the_launch(capsys):
  with pytest.raises(SystemExit):
    launch.main(["jobset", "quickstart", "--help"])
  printed = capsys.readouterr().out
  assert all(option in printed for option in ("--topology", "--image", "--warm-accuracy", "--max-lag"))


def test_the_first_help_has_all_back_ends(capsys):
  assert launch.main(["--help"]) == 0
  printed = capsys.readouterr().out
  assert all(f"  {name} " in printed for name in BACK_ENDS)


def test_names_are_made_of_folders():
  assert _job.make_name("gs://bucket/Runs/GSM8K_lag.16/") == "gsm8k-lag-16"
  assert _job.make_name("gs://bucket/16-chips") == "run-16-chips"
  assert _job.make_name("gs://bucket/" + "a" * 27 + "-b") == "a" * 27


@pytest.mark.parametrize(
  ("written", "kind"),
  [
    ("ERROR: (gcloud.x) Could not fetch resource:\n - Quota 'TPUS' exceeded.  Limit: 4.0 in region x.", "quota"),
    ("WARNING: add a quota project.\nERROR: DEADLINE_EXCEEDED: Deadline exceeded", "other"),
    ("ERROR: The zone does not have enough resources available: ZONE_RESOURCE_POOL_EXHAUSTED", "capacity"),
    ("ERROR: NOT_FOUND: x", "missing"),
    ("ERROR: invalid argument", "other"),
  ],
)
def test_failures_of_the_cloud_have_kinds(written, kind):
  error = _commands.CommandError(("gcloud", "x"), written)
  assert error.kind == kind
  assert str(error).endswith(f"failed: ERROR{written.partition('ERROR')[2]}".replace("\n -", " -"))


def test_a_command_that_does_not_answer_is_slow():
  with pytest.raises(_commands.CommandError, match="no answer within 0 s") as error:
    _commands.run(("sleep", "9"), timeout=0.01)
  assert error.value.kind == "slow"


def test_the_image_has_what_a_run_needs():
  """Without a daemon: the files that it copies are there, and are those that the machines get."""
  folder = ROOT / "experiments" / "launch"
  text = (folder / "Dockerfile").read_text()
  copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
  assert sorted(copied) == sorted(_script.CODE)
  kept = [line[1:] for line in (folder / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
  assert sorted(kept) == sorted(_script.CODE)
  extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)[1].split(",")
  setup = (ROOT / "setup.py").read_text()
  assert all(f'"{extra}":' in setup for extra in extras)


if __name__ == "__main__":
  update_golden_files()
