"""Prompts that a run cannot use are found before its first step, and other data do not resume it."""

import dataclasses

import pytest
from runtime_helpers import rows
from tiny import DigitSums
from tiny import Options
from tiny import sums
from tiny import tiny

from async_rl import recording
from async_rl import runtime
from async_rl import tasks

pytestmark = pytest.mark.usefixtures("two_devices")


@dataclasses.dataclass(frozen=True)
class LongSums(DigitSums):
  """Some prompts have a third number, and so ten tokens where eight are allowed."""

  long: tuple[int, ...] = (5,)
  split: str = "train"

  def prompts(self, split):
    prompts = super().prompts(split)
    return tasks.Prompts(range(len(prompts)), lambda _, i: self._lengthened(prompts[i], split))

  def _lengthened(self, prompt, split):
    long = prompt.id in self.long and split == self.split
    return prompt._replace(text=f"11+{prompt.text}") if long else prompt


def long_tiny(folder, kind=LongSums, fields=None, **given):
  options = runtime.override(Options(), run_dir=str(folder), steps=2)
  return tiny(options, task=sums(options, kind, **(fields or {})), **given)


def test_a_prompt_that_is_too_long_is_named_before_the_run_and_the_advice_works(tmp_path):
  folder = tmp_path / "run"
  message = r"1 of 64 prompts cannot be used: prompt 5: it has 10 tokens, more than max_prompt_tokens=8\. "
  with pytest.raises(
    ValueError, match=message + r".*raise max_prompt_tokens to 10, or skip them \(--skip-bad-prompts\)"
  ):
    runtime.train(long_tiny(folder))
  assert not folder.exists()
  assert runtime.train(long_tiny(folder, max_prompt_tokens=10)).version == 2


def test_a_run_is_not_lost_to_one_that_was_to_replace_it_and_could_not_begin(tmp_path):
  folder = tmp_path / "run"
  runtime.train(long_tiny(folder, max_prompt_tokens=10))
  with pytest.raises(ValueError, match="1 of 64 prompts cannot be used"):
    runtime.train(long_tiny(folder, overwrite=True))
  assert runtime.train(long_tiny(folder, max_prompt_tokens=10, steps=3)).version == 3
  assert runtime.train(long_tiny(folder, max_prompt_tokens=11, steps=1, overwrite=True)).version == 1
  assert not (folder / ".replaced").exists()


def test_prompts_of_evaluations_are_checked_too(tmp_path):
  fields = {"long": (3,), "split": "test"}
  with pytest.raises(ValueError, match="1 of 8 prompts cannot be used: prompt 3: it has 10 tokens"):
    runtime.train(long_tiny(tmp_path / "run", fields=fields, eval_prompts=8))
  summary = runtime.train(long_tiny(tmp_path / "run", fields=fields, eval_prompts=8, skip_bad_prompts=True))
  assert summary.accuracy is not None


def test_skipped_prompts_are_counted_on_the_console(tmp_path, capfd):
  fields = {"long": tuple(range(1, 64, 2))}
  summary = runtime.train(long_tiny(tmp_path / "run", fields=fields, skip_bad_prompts=True))
  assert "32 of 64 prompts are left out (32 too long)" in capfd.readouterr().err
  assert len(rows(summary)) == 2


def test_other_data_do_not_resume_a_run(tmp_path):
  given = {"max_prompt_tokens": 10}
  runtime.train(long_tiny(tmp_path / "run", **given))
  other = {"fields": {"long": (6,)}, **given}
  with pytest.raises(recording.CheckpointError, match="training prompts are not those that .*run was started with"):
    runtime.train(long_tiny(tmp_path / "run", steps=3, **other))
  assert runtime.train(long_tiny(tmp_path / "run", steps=3, **given)).version == 3


@dataclasses.dataclass(frozen=True)
class ContradictorySums(DigitSums):
  """Prompts 3 and 9 have the text of prompt 1, and prompt 9 another answer."""

  def prompts(self, split):
    prompts = super().prompts(split)
    changed = {3: prompts[1]._replace(id=3), 9: prompts[1]._replace(id=9, answer="another")}
    return tasks.Prompts(
      range(len(prompts)), lambda _, i: changed.get(i, prompts[i]) if split == "train" else prompts[i]
    )


def test_prompts_that_contradict_each_other_are_refused_or_left_out_and_counted(tmp_path, capfd):
  with pytest.raises(ValueError, match="3 of 64 .*: prompt 1: it has another answer than the same prompt at prompt 9;"):
    runtime.train(long_tiny(tmp_path / "run", ContradictorySums))
  assert not (tmp_path / "run").exists()
  assert runtime.train(long_tiny(tmp_path / "run", ContradictorySums, skip_bad_prompts=True)).version == 2
  assert "3 of 64 prompts are left out (3 contradictory)" in capfd.readouterr().err
