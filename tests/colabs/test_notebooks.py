"""Every notebook runs in an empty folder, where its first cell installs the wheel, and shows what it claims."""

import re

import nbformat
import pytest
from notebooks import NOTEBOOKS
from notebooks import ROOT
from tiny_weights import GSM8K
from tiny_weights import chatting_weights

NAMES = [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_have_a_badge_parameters_and_no_outputs(name):
  notebook = nbformat.read(ROOT / "colabs" / f"{name}.ipynb", as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
  (link,) = re.findall(r"colab\.research\.google\.com/github/(\S+)\)", notebook.cells[0].source)
  account = link.partition("/")[0]
  assert link == f"{account}/async_rl/blob/HEAD/colabs/{name}.ipynb"
  assert f"https://github.com/{account}/async_rl/archive/HEAD.zip" in notebook.cells[1].source
  assert f"github/{link}" in (ROOT / "README.md").read_text()


def test_notebooks_install_alike():
  cells = [nbformat.read(path, as_version=4).cells[1].source.splitlines() for path in NOTEBOOKS]
  assert len({"\n".join(lines[2:]) for lines in cells}) == 1
  assert all(lines[1].startswith("EXTRAS, OTHERS = ") for lines in cells)


def test_quickstart(run):
  parameters = """
STEPS, PROMPTS, SHORT = 5, 16, 2
SIZES = {"groups": 4, "samples": 4, "slots": 16, "rows": 8, "warm_accuracy": 0.0}
"""
  text, shown = run("quickstart", parameters, devices=2)
  assert "2 x cpu: 1 devices sample and 1 learn, side by side." in text
  assert re.search(r"accuracy \d\.\d{3} -> \d\.\d{3}: a gain of", text)
  assert len(re.findall(r"step +\d+: lag \d\.\d \(at most [0-4]\)", text)) == 5
  assert re.search(r"topr +5 .*\n.*a3po +2 ", text)
  assert len(shown) == 2


@pytest.mark.slow
def test_stabilizers(run):
  text, shown = run("stabilizers", "SEEDS, SHORT, LAG, STEPS = 2, 20, 12, 180")
  assert "behavior [B, T] (64, 6) log_weights [B] (64,)" in text
  rewards = {name.strip(): float(r) for name, r in re.findall(r"^(lag.*?) reward over .*?: (\d\.\d\d) ±", text, re.M)}
  assert len(rewards) == 7
  stale = rewards["lag 12"]
  assert all(rewards[name] > stale + 0.05 for name in ("lag 0", "lag 12, scale_by_ess", "lag 12, TOPR, scale_by_ess"))
  gaps = [float(gap) for gap in re.findall(r"largest difference to optax (\S+)", text)]
  assert len(gaps) == 3
  assert max(gaps) < 1e-2
  assert len(shown) == 1


@pytest.mark.slow
def test_lag_laboratory(run):
  parameters = """
SEEDS, SIZES = 1, {"groups": 2, "samples": 4, "steps": 8, "probe_every": 2, "probe_prompts": 8}
RECORDED = {"steps": 4, "max_lag": 2, "picture": False}
"""
  text, shown = run("lag_laboratory", parameters, devices=2)
  assert re.findall(r"reinforce at lag +(\d+): accuracy \d\.\d\d", text) == ["0", "8", "16", "32"]
  replayed = re.findall(r"(\S+) -> (\S+) in 4 steps; largest difference of the replay (\S+)", text)
  assert [difference for _, _, difference in replayed] == ["0.0e+00"] * 3
  assert all(float(first) != float(last) for first, last, _ in replayed)
  assert len(shown) == 4


@pytest.mark.slow
def test_gsm8k(run, tmp_path_factory):
  weights = chatting_weights(tmp_path_factory.mktemp("weights"))
  sizes = {"max_prompt_tokens": 512, "row_tokens": 640, "steps": 2}
  text, shown = run("gsm8k", f"WEIGHTS, FOLDER, SIZES = {str(weights)!r}, {str(GSM8K)!r}, {sizes}")
  assert "take turns on one device" in text
  assert "No accelerator: a few small steps." in text
  assert re.search(r"step +2: \d+\.\d s, lag", text)
  assert len(shown) == 1


@pytest.mark.slow
def test_tpu_plan_without_the_compiler(run):
  text, shown = run("tpu_plan", "del SLICES['h100:2']")
  assert "There is no libtpu here; the plans below are for H100s instead." in text
  assert "quickstart: 0M parameters, 2 layers, on h100:2" in text
  assert re.search(r"h100:8: learner .* chip-hours for 266 steps", text)
  assert re.search(r"What does not fit, and what would help:\n +step needs .* --lora-rank 16 saves", text)
  assert len(shown) == 1
