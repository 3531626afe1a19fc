"""Programs of runs compile for TPUs, and nothing makes them slow or large there. Runs where `libtpu` is installed."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from studies import tpu_gate

from experiments.plan import __main__ as command
from experiments.plan import _compile
from experiments.plan import _measure

pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")


@pytest.fixture(autouse=True)
def _compiled_programs_are_kept(monkeypatch):
  """They are found again by their text, their devices and the compiler."""
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tpu_gate.ROOT / ".pytest_cache"))


@pytest.mark.parametrize(
  "check",
  [*tpu_gate.FAST, *(pytest.param(check, marks=pytest.mark.slow) for check in tpu_gate.SLOW)],
  ids=lambda check: ", ".join([check.case, *check.programs]),
)
def test_programs_compile_and_update_in_place_and_gather_no_parameters(check):
  """Of all cases and programs, `python tests/studies/tpu_gate.py` shows it."""
  assert tpu_gate.find_faults(check.case, check.programs) == []


@pytest.mark.usefixtures("tpu_chips")
@pytest.mark.parametrize(
  ("model", "prompt", "completion", "share"),
  [
    ("qwen3-0.6b", "320", "256", (160 + 128 / 2 + 256 / 2) / 576),
    ("gemma-3-1b", "2048", "2048", (512 + 2 * 256 / 2) / 4096),  # both layers have a window
  ],
)
def test_a_plan_tells_what_a_decode_step_reads_of_the_cache_with_each_backend(model, prompt, completion, share):
  """XLA's products read all positions; the kernel those that are filled, or the window's, and half a block in vain."""
  arguments = ["gsm8k", "--topology", "v5e:2x4", "--model", model, "--slots", "64", "--no-compile"]
  arguments += ["--row-tokens", "4096", "--max-prompt-tokens", prompt, "--max-completion-tokens", completion]

  def counted(*options):
    name, wanted, chosen = command.parse([*arguments, *options])
    request = dataclasses.replace(command.request_of(name, wanted, chosen), layers=2)
    head, _, result = _measure.messages(request, ["decode"])
    return head["cache_reads"], result["costs"]["nbytes"] / chosen.rollout.decode_chunk

  kernel, kernel_bytes = counted()
  einsum, einsum_bytes = counted("--attention", "splash")
  assert list(kernel) == ["ragged", "xla"] == list(einsum)[::-1]
  assert kernel == einsum
  assert kernel["ragged"] / kernel["xla"] == share
  difference = kernel["xla"] - kernel["ragged"]
  assert difference < einsum_bytes - kernel_bytes < 1.5 * difference  # and the probabilities of all positions


def test_splits_of_several_slices_are_refused_with_the_one_that_works(capsys):
  assert command.main(["quickstart", "--topology", "v6e:2x2", "--slices", "2", "--generation-devices", "2"]) == 2
  assert "generation_devices=0, by which all chips do both" in capsys.readouterr().err


class _CountingCompiler:
  """A program that counts its compilations, of which one may fail."""

  def __init__(self, factor, problem=None):
    self._lowered = jax.jit(lambda x: factor * x @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    self.problem, self.count = problem, 0

  def as_text(self):
    return self._lowered.as_text()

  def compile(self):
    self.count += 1
    if self.problem:
      raise jax.errors.JaxRuntimeError(self.problem)
    return self._lowered.compile()


def test_a_program_is_compiled_once_and_also_found_too_large_once(monkeypatch, tmp_path):
  """Every other failure may be of the moment, so that it is tried again."""
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
  devices = [types.SimpleNamespace(platform="tpu", device_kind="TPU v5", id=0, process_index=0)]
  program = _CountingCompiler(2)
  first, again = (_compile.compile_program(program, devices) for _ in range(2))
  assert first == again
  assert (program.count, first.memory["arguments"]) == (1, 4 * 64)
  assert "ENTRY" in first.text
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_of=another_kind")
  _compile.compile_program(program, devices)
  assert program.count == 2
  for factor, problem, error, count in (
    (3, "RESOURCE_EXHAUSTED: Used 50.30G of 31.25G hbm", _compile.DoesNotFit, 1),
    (4, "INTERNAL: something", jax.errors.JaxRuntimeError, 2),
  ):
    program = _CountingCompiler(factor, problem)
    for _ in range(2):
      with pytest.raises(error, match=problem):
        _compile.compile_program(program, devices)
    assert program.count == count
