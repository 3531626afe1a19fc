"""The notebook on plans where TPUs' compiler is at hand; tests/run.sh gives it an environment with libtpu."""

import re

import pytest

pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")


@pytest.mark.slow
def test_tpu_plan(run):
  text, shown = run("tpu_plan", "del SLICES['v6e:2x4']")
  assert "quickstart: 0M parameters, 2 layers, on v5e:2x4" in text
  assert re.search(r"^step +learner +yes ", text, re.M)  # only the compiler knows
  assert re.search(r"v5e:2x4: learner .* chip-hours for 266 steps", text)
  assert re.search(r"What does not fit, and what would help:\n +step needs .* --fsdp 4 saves", text)
  assert len(shown) == 1
