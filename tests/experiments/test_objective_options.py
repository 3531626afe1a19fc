"""Constants of the loss on the command line, after the objective's name."""

import pytest
from tiny_weights import chatting_weights

from experiments import configs
from experiments import train

CONFIGS = [name for name in configs.NAMES if hasattr(configs.load(name).defaults, "correction")]


def test_the_configs_with_an_objective_are_these():
  assert CONFIGS == ["countdown", "gsm8k", "gsm8k_calculator", "quickstart"]


@pytest.mark.parametrize("name", CONFIGS)
def test_constants_reach_the_loss_in_every_config(name, tmp_path, monkeypatch):
  if name == "countdown":
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
  monkeypatch.chdir(tmp_path)
  weights = [] if name == "quickstart" else ["--weights", str(chatting_weights(tmp_path))]
  config, options = train.parse([name, "--objective", "trm:max_bound=5,mean_bound=.1", *weights])
  loss = config.experiment(options).objective.loss
  assert (loss.func.__name__, loss.keywords) == ("trm", {"max_bound": 5.0, "mean_bound": 0.1})


@pytest.mark.parametrize(
  ("objective", "message"),
  [
    ("trm:max_bound=-1", "error: *max_bound* must be a number at least 0, got max_bound=-1.0; inf for no bound."),
    (
      "trm:max_bond=1",
      "error: *max_bond* is not an option of 'trm', which takes max_bound, mean_bound; did you mean 'max_bound'?",
    ),
    ("m2po:budget=much", "error: *budget* must be a number, true, false or none, got budget='much'."),
  ],
)
def test_bad_constants_are_one_sentence_before_anything_is_written(objective, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert train.main(["quickstart", "--run-dir", "run", "--objective", objective]) == 2
  assert capsys.readouterr().err.strip() == message
  assert not (tmp_path / "run").exists()


def test_constants_are_recorded_and_a_run_resumes_with_the_same_ones_alone(tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  sizes = [f"--{key.replace('_', '-')}={value}" for key, value in configs.load("quickstart").smoke.items()]
  command = ["quickstart", "--run-dir", "run", *sizes, "--no-picture", "--reward-workers", "0"]
  wide, wider = (["--objective", f"trm:max_bound={x},mean_bound=inf"] for x in (5, 50))
  assert train.main([*command, *wide, "--steps", "1"]) == 0
  assert "trm:max_bound=5,mean_bound=inf" in (tmp_path / "run" / "config.txt").read_text()
  assert train.main([*command, *wider, "--steps", "2"]) == 2
  change = "objective: 'trm:max_bound=5,mean_bound=inf' -> 'trm:max_bound=50,mean_bound=inf'"
  assert change in capfd.readouterr().err
  assert train.main([*command, *wide, "--steps", "2"]) == 0
  assert "resumed at step 1" in "".join(capfd.readouterr())
