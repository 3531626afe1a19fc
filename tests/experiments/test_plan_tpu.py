"""Programs of runs compile for TPUs, and nothing makes them slow or large there. Runs where `libtpu` is installed."""

import pytest
from studies import tpu_gate

from experiments.plan import __main__ as command

pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")


@pytest.fixture(autouse=True)
def _costs_are_kept_beside_compiled_programs(monkeypatch):
  """They are found again by the program's text, the compiler and the code that counts."""
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tpu_gate.ROOT / ".pytest_cache"))


@pytest.mark.parametrize("check", tpu_gate.FAST, ids=lambda check: check.case)
def test_programs_compile_and_update_in_place_and_gather_no_parameters(check):
  """Of all cases and programs, `python tests/studies/tpu_gate.py` shows it."""
  assert tpu_gate.find_faults(check.case, check.programs) == []


def test_splits_of_several_slices_are_refused_with_the_one_that_works(capsys):
  assert command.main(["quickstart", "--topology", "v6e:2x2", "--slices", "2"]) == 2
  assert "generation_devices=0, by which all chips do both" in capsys.readouterr().err
