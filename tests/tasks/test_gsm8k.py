"""GSM8K from jsonl and from TFDS, with a few problems of our own."""

import json
import os
import pathlib

import numpy as np
import pytest

from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP

PROBLEMS = [
  ("A crate holds 12 jars. How many jars do 6 crates hold?", "6 crates hold 6*12 = <<6*12=72>>72 jars.\n#### 72"),
  (
    "Ana earns $1,500 and spends a third. What is left?",
    "1500/3 = <<1500/3=500>>500\n1500-500 = <<1500-500=1000>>1000\n#### 1,000",
  ),
  ("It is 3 degrees and falls by 8. How cold is it?", "3-8 = <<3-8=-5>>-5\n#### -5"),
  ("Half of 5 litres is how much?", "5/2 = <<5/2=2.5>>2.5\n#### 2.5"),
]


def records():
  return [{"question": question, "answer": answer} for question, answer in PROBLEMS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("gsm8k")
  for split, rows in (("train", records()), ("test", records()[:2])):
    (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
  return path


@pytest.fixture(scope="module")
def task(folder):
  return tasks.GSM8K(folder)


def test_prompts(task):
  train = task.prompts("train")
  assert (len(train), len(task.prompts("test"))) == (4, 2)
  assert train[3].id == 3
  assert train[3].text[0]["content"].startswith("Half of 5 litres is how much?\nThink")
  plain = tasks.GSM8K(task.folder, chat=False, instruction="").prompts("train")[3]
  assert plain.text == "Half of 5 litres is how much?\n"


VERDICTS = [
  (0, "#### 72", 1.0, 1.0),
  (0, "6 * 12 is 72.", 1.0, 0.0),
  (0, "So $72.00 jars", 1.0, 0.0),
  (0, r"It is \boxed{72}.", 1.0, 1.0),
  (0, "#### 73", 0.0, 0.0),
  (0, "#### 72 or 73", 1.0, 1.0),
  (0, "#### 73 or 72", 0.0, 0.0),
  (0, "#### 7.2e1", 1.0, 1.0),
  (0, "#### 144/2", 1.0, 1.0),
  (0, "72 jars, thus #### 12", 0.0, 0.0),
  (0, "#### 720", 0.0, 0.0),
  (0, "#### -72", 0.0, 0.0),
  (0, "", 0.0, 0.0),
  (1, "#### $1,000.", 1.0, 1.0),
  (1, "#### 1000 dollars", 1.0, 1.0),
  (1, "#### 1", 0.0, 0.0),
  (2, "#### −5", 1.0, 1.0),
  (2, "#### 5", 0.0, 0.0),
  (2, "#### -5 °C", 1.0, 1.0),
  (3, "#### 2.5", 1.0, 1.0),
  (3, "#### 5/2 l", 1.0, 1.0),
  (3, "#### 2½", 1.0, 1.0),
  (3, "#### 2", 0.0, 0.0),
]


@pytest.mark.parametrize(("index", "text", "last", "marked"), VERDICTS)
def test_verdicts(folder, index, text, last, marked):
  for answer, reward in (("last", last), ("marked", marked)):
    task = tasks.GSM8K(folder, answer=answer)
    prompt = task.prompts("train")[index]
    assert task.reward(prompt, text, STOP) == reward
    assert task.reward(prompt, text, LENGTH) == 0.0


def test_solutions_earn_the_reward_and_hold_no_annotations(task):
  for prompt in task.prompts("train"):
    solution = task.solution(prompt, np.random.default_rng(0))
    assert task.reward(prompt, solution, STOP) == 1.0
    assert "<<" not in solution


def test_from_tfds_when_prepared(tmp_path):
  """Writes our problems where TFDS keeps `gsm8k`, in its features, and reads them through the library's builder."""
  import tensorflow_datasets as tfds

  class Ours(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    name = "gsm8k"

    def _info(self):
      features = {key: tfds.features.Text() for key in ("question", "answer", "annotation", "short_answer")}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples() for split in ("train", "test")}

    def _generate_examples(self):
      for i, record in enumerate(records()):
        yield i, record | {"annotation": "", "short_answer": ""}

  Ours(data_dir=tmp_path, file_format="array_record").download_and_prepare()
  task = tasks.GSM8K(data_dir=str(tmp_path))
  assert sorted(p.answer for p in task.prompts("train")) == sorted(answer for _, answer in PROBLEMS)
  assert task.prompts("test")[0] == task.prompts("test")[0]


def test_bad_data_is_named(tmp_path):
  task = tasks.GSM8K(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
    task.prompts("train")
  (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n')
  with pytest.raises(ValueError, match=r"train\.jsonl:2: .*answer"):
    task.prompts("train")
  (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": null}')
  with pytest.raises(ValueError, match=r"train\.jsonl:1: .*answer"):
    task.prompts("train")
  (tmp_path / "train.jsonl").write_text("{")
  with pytest.raises(ValueError, match=r"train\.jsonl:1: not JSON"):
    task.prompts("train")
  (tmp_path / "train.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="no records"):
    task.prompts("train")
  with pytest.raises(ValueError, match="did you mean 'test'"):
    task.prompts("tests")
  with pytest.raises(ValueError, match="did you mean 'marked'"):
    tasks.GSM8K(answer="mark")


#: What a line of the file holds, and what is right: the number that earns the reward, or a part of the error.
ANSWERS = [
  ('"#### 72"', "72"),
  ('"72"', "72"),
  ("72", "72"),
  ("72.5", "72.5"),
  ("-3", "-3"),
  ("1e3", "1000"),
  ('"$1,000."', "1000"),
  ('"1_000"', "1000"),
  ('"18 000"', "18000"),
  ('"１８"', "18"),
  ('"50%"', "50"),
  ('"−5"', "-5"),
  ('"1/2"', "0.5"),
  ('"9*8=72\\n####\\n72"', "72"),
  ('"#### 18 / 2 = 9"', "9"),
  ('"#### seventy-two"', "field 'answer' must be a number"),
  ('"seventy-two"', "field 'answer' must be a number"),
  ('"There are 72."', "field 'answer' must be a number"),
  ('"#### 18 / 2"', "field 'answer' must be a number"),
  ('"1e9999999"', "field 'answer' must be a number"),
  ('"NaN"', "field 'answer' must be a number"),
  ('"####"', "field 'answer' must be a number"),
  ('" "', "field 'answer' must be a text that is not blank"),
  ("true", "field 'answer' must be a text or a number, got True"),
  ("[72]", r"field 'answer' must be a text or a number, got \[72\]"),
  ('{"value": 72}', "field 'answer' must be a text or a number"),
  ("null", r"missing: \['answer'\]"),
  ("NaN", "NaN is no JSON"),
  ("-Infinity", "-Infinity is no JSON"),
  ("1" * 5000, "not JSON|must be a number|Exceeds the limit"),
  ("1e999", "field 'answer' must be a number"),
]


@pytest.mark.parametrize(("answer", "right"), ANSWERS, ids=[answer[:20] for answer, _ in ANSWERS])
def test_answers_work_or_are_refused_with_file_line_and_field(tmp_path, answer, right):
  text = f'{{"question": "a", "answer": "#### 1"}}\n\n{{"question": "b", "answer": {answer}}}\n'
  (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
  task = tasks.GSM8K(tmp_path)
  if right[-1].isdigit():
    prompt = task.prompts("train")[1]
    assert task.reward(prompt, f"#### {right}", STOP) == 1.0
    assert task.reward(prompt, "#### 123456", STOP) == 0.0
    solution = task.solution(prompt, np.random.default_rng(0))
    assert tasks.GSM8K(tmp_path, answer="marked").reward(prompt, solution, STOP) == 1.0
  else:
    with pytest.raises(ValueError, match=rf"train\.jsonl:3: .*({right})"):
      task.prompts("train")


#: Whole lines of a file, and a part of the error; None where the line is fine.
LINES = [
  ('{"question": "cut \\ud83d", "answer": "1"}', "'question' holds half of a surrogate pair"),
  ('{"question": "whole \\ud83d\\ude00", "answer": "1"}', None),
  ('{"question": "a", "answer": "1 \\udc00"}', "'answer' holds half of a surrogate pair"),
  ('{"question": "a", "answer": "1", "source": ["\\ud800"]}', "'source' holds half of a surrogate pair"),
  ('{"question": 5, "answer": "1"}', "'question' must be a text that is not blank, got 5"),
  ('{"question": " \\n", "answer": "1"}', "'question' must be a text that is not blank"),
  ('{"question": "a", "question": "b", "answer": "1"}', "'question' occurs twice"),
  ('{"question": "a"}', r"missing: \['answer'\]"),
  ('["a", "1"]', "expected an object"),
  ('"a"', "expected an object"),
  ("null", "expected an object"),
  ('{"question": "a", "answer": "1"} {}', "not JSON: Extra data"),
  ("{'question': 'a', 'answer': '1'}", "not JSON"),
  ('{"question": "a", "answer": "1",}', "not JSON"),
  ("[" * 100_000, "nested too deeply"),
  ('{"question": "' + "long " * 50_000 + '", "answer": "1"}', None),
  ('\t {"question": "a", "answer": "1"} \r', None),
  ('{"question": "\\u2028 line", "answer": "1"}', None),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line[:30] for line, _ in LINES])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_are_read_or_refused_with_file_and_line(tmp_path, line, message, newline):
  """Behind a byte-order mark, a good line and a blank one."""
  text = newline.join(["\ufeff" + '{"question": "first", "answer": "1"}', "", line])
  (tmp_path / "train.jsonl").write_bytes(text.encode())
  task = tasks.GSM8K(tmp_path)
  if message is None:
    prompts = task.prompts("train")
    assert len(prompts) == 2
    assert prompts.where(1) == f"{tmp_path}/train.jsonl:3"
  else:
    with pytest.raises(ValueError, match=rf"train\.jsonl:3: .*{message}"):
      task.prompts("train")


def test_bytes_that_are_no_text_are_named(tmp_path):
  (tmp_path / "train.jsonl").write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}')
  with pytest.raises(ValueError, match=r"train\.jsonl:2: not UTF-8"):
    tasks.GSM8K(tmp_path).prompts("train")


def test_whole_data_set():
  """Every reference solution of the real data set earns the reward."""
  folder = pathlib.Path(os.environ.get("ASYNC_RL_GSM8K", ""))
  if not (folder / "train.jsonl").exists():
    pytest.skip("set ASYNC_RL_GSM8K to the folder with train.jsonl and test.jsonl")
  task = tasks.GSM8K(folder, answer="marked")
  for split, size in (("train", 7473), ("test", 1319)):
    prompts = task.prompts(split)
    assert len(prompts) == size
    assert all(task.reward(p, task.solution(p, np.random.default_rng(0)), STOP) == 1.0 for p in prompts)
