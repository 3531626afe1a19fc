"""What can be known of prompts before a run: found in one walk, named, and left out on request."""

import json
import subprocess
import sys

import numpy as np
import pytest

from async_rl import tasks
from async_rl.types import Prompt


def by_words(texts):
  """Encodes a text as one token a word; like a chat template, it refuses messages of an unknown role."""

  def encode(text):
    if isinstance(text, str):
      return text.split()
    if text[0]["role"] != "user":
      raise ValueError("unknown role")
    return [word for message in text for word in message["content"].split()]

  return [encode(text) for text in texts]


def chat(content, role="user"):
  return [{"role": role, "content": content}]


GOOD = ["a b", chat("a"), "a b c", "é 🙂", "a b"]
#: A prompt's text, the reason for which it cannot be used, and a part of the sentence.
BAD = [
  ("a b c d", "too long", "it has 4 tokens, more than max_prompt_tokens=3"),
  (chat("a b c d"), "too long", "it has 4 tokens"),
  ("", "blank", "its text is blank"),
  (" \n\t", "blank", "its text is blank"),
  (chat(" "), "blank", "its text is blank"),
  (chat(None), "unreadable", "messages whose role and content are strings"),
  ([], "unreadable", "must be a string or a list of messages"),
  (None, "unreadable", "must be a string or a list of messages .*, got None"),
  (b"a b", "unreadable", "must be a string"),
  ([{"content": "a"}], "unreadable", "messages whose role and content are strings"),
  (["a"], "unreadable", "messages whose role and content are strings"),
  (chat("a", "robot"), "unreadable", "unknown role"),
  ("cut \ud83d", "unreadable", "half of a surrogate pair"),
  (chat("cut \udc00"), "unreadable", "half of a surrogate pair"),
]


def prompts_of(texts, answers=None):
  """Prompts of these texts; equal ones have equal answers unless others are given."""
  return [Prompt(i, text, texts.index(text) if answers is None else answers[i]) for i, text in enumerate(texts)]


def test_good_prompts_pass():
  check = tasks.check_prompts(prompts_of(GOOD), by_words, 3)
  assert (check.prompts, check.skipped, check.reasons) == (5, (), {})
  assert (check.repeated, check.longest) == (1, 3)


@pytest.mark.parametrize(("text", "reason", "message"), BAD, ids=range(len(BAD)))
def test_a_prompt_of_no_use_is_refused_or_left_out(text, reason, message):
  prompts = prompts_of([*GOOD[:2], text, *GOOD[2:]])
  with pytest.raises(ValueError, match=rf"1 of 6 prompts cannot be used: prompt 2: .*{message}"):
    tasks.check_prompts(prompts, by_words, 3)
  check = tasks.check_prompts(prompts, by_words, 3, skip=True)
  assert (check.skipped, check.reasons) == ((2,), {reason: 1})


def test_the_error_names_the_first_ones_the_number_and_the_remedy():
  prompts = prompts_of(["a b c d e", "a", "", "a b c d", "a b c d e f"])
  with pytest.raises(ValueError, match="prompts cannot be used") as caught:
    tasks.check_prompts(prompts, by_words, 3)
  assert str(caught.value) == (
    "4 of 5 prompts cannot be used: prompt 0: it has 5 tokens, more than max_prompt_tokens=3; prompt 2: its text is "
    "blank; prompt 3: it has 4 tokens, more than max_prompt_tokens=3; and 1 more. "
    "Correct the data, raise max_prompt_tokens to 6, or skip them (--skip-bad-prompts)."
  )
  check = tasks.check_prompts(prompts, by_words, 3, skip=True)
  assert (check.skipped, check.reasons) == ((0, 2, 3, 4), {"too long": 3, "blank": 1})


def test_following_the_remedy_works():
  prompts = prompts_of(["a b c d e", "a", "a b c d e f"])
  assert tasks.check_prompts(prompts, by_words, 6).skipped == ()


def test_nothing_is_left_where_all_are_bad():
  with pytest.raises(ValueError, match="2 of 2 prompts cannot be used: .* or use other data"):
    tasks.check_prompts(prompts_of(["", " "]), by_words, 3, skip=True)


def test_the_same_prompt_with_another_answer_is_refused_or_left_out_wherever_it_stands():
  prompts = prompts_of(["a", "b", "a", "b", "a", "c"], [1, 2, 1, 2, 3, 4])
  with pytest.raises(ValueError, match="cannot be used") as caught:
    tasks.check_prompts(prompts, by_words, 3)
  assert str(caught.value) == (
    "3 of 6 prompts cannot be used: "
    "prompt 0: it has another answer than the same prompt at prompt 4; "
    "prompt 2: it has another answer than the same prompt at prompt 4; "
    "prompt 4: it has another answer than the same prompt at prompt 0. "
    "Correct the data, or skip them (--skip-bad-prompts)."
  )
  check = tasks.check_prompts(prompts, by_words, 3, skip=True)
  assert (check.skipped, check.reasons, check.repeated) == ((0, 2, 4), {"contradictory": 3}, 1)
  assert "3 of 6 prompts are left out (3 contradictory); 1 of 6 prompts repeat an earlier one" in check.describe()


@pytest.mark.parametrize(
  ("answer", "other", "same"),
  [
    (1, 1, True),
    (1, "1", False),
    (1.0, 1, False),
    ({"a": 1}, {"a": 1}, True),
    ((1, 2), [1, 2], True),
    (None, 0, False),
  ],
)
def test_answers_are_compared_as_they_are_unless_the_task_knows_better(answer, other, same):
  prompts = [Prompt(0, chat("a"), answer), Prompt(1, chat("a"), other), Prompt(2, "b", 0)]
  assert tasks.check_prompts(prompts, skip=True).skipped == (() if same else (0, 1))
  assert tasks.check_prompts(prompts, same_answer=lambda a, b: True).repeated == 1


def test_a_prompt_with_another_problem_keeps_it():
  prompts = prompts_of(["a b c d", "a b c d", "a"], [1, 2, 3])
  assert tasks.check_prompts(prompts, by_words, 3, skip=True).reasons == {"too long": 2}


ANSWERS_OF_TASKS = [
  (tasks.GSM8K(), ["2 + 2 = 4 #### 4", "#### 4.0", "4"], ["#### 5"]),
  (tasks.Calculator(), ["<<2+2=4>>4 #### 4", "4"], ["#### 40"]),
  (tasks.Maths(""), [r"\frac{1}{2}", "0.5", "1/2"], ["2", r"\frac{1}{3}"]),
  (tasks.Summaries("posts"), ["short", "another summary"], []),
]


@pytest.mark.parametrize(("task", "same", "others"), ANSWERS_OF_TASKS, ids=[t.name for t, *_ in ANSWERS_OF_TASKS])
def test_tasks_compare_what_they_reward(task, same, others):
  if task.name == "maths":
    pytest.importorskip("math_verify", reason="needs math-verify")
  first = Prompt(0, "a", same[0])
  assert all(task.same_answer(first, first._replace(answer=answer)) for answer in same)
  assert not any(task.same_answer(first, first._replace(answer=answer)) for answer in others)


def test_both_lines_of_a_contradiction_are_named(tmp_path):
  rows = [{"question": "one", "answer": "#### 1"}, {"question": "two", "answer": "2"}]
  rows += [{"question": "one", "answer": "is it? #### 1"}, {"question": "two", "answer": "#### 3"}]
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
  task = tasks.GSM8K(tmp_path)
  path = f"{tmp_path}/train.jsonl"
  with pytest.raises(ValueError, match=f"{path}:2: it has another answer than the same prompt at {path}:4; {path}:4: "):
    tasks.check_prompts(task.prompts("train"), same_answer=task.same_answer)
  check = tasks.check_prompts(task.prompts("train"), same_answer=task.same_answer, skip=True)
  assert (check.skipped, check.repeated) == ((1, 3), 1)


def test_ids_are_positions():
  prompts = [Prompt(0, "a", 0), Prompt(0, "b", 1), Prompt(2, "c", 2)]
  with pytest.raises(ValueError, match="prompt 1: item 1 has id 0; ids must be the positions"):
    tasks.check_prompts(prompts)
  assert tasks.check_prompts(prompts, skip=True).reasons == {"misnumbered": 1}


def test_file_and_line_are_named(tmp_path):
  rows = [{"question": "one", "answer": 1}, {"question": "one two three four", "answer": 2}]
  (tmp_path / "train.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
  task = tasks.GSM8K(tmp_path, chat=False, instruction="")
  with pytest.raises(ValueError, match=rf"1 of 2 prompts cannot be used: {tmp_path}/train\.jsonl:3: it has 4 tokens"):
    tasks.check_prompts(task.prompts("train"), by_words, 3)


def test_an_answer_that_only_the_task_can_judge_is_found():
  """As with a data set of TFDS, whose records are read one by one."""
  records = [{"question": "a", "answer": b"#### 1"}, {"question": "b", "answer": b"#### one"}]
  prompts = tasks.Prompts(records, tasks.GSM8K().prompt)
  with pytest.raises(ValueError, match="prompt 1: field 'answer' must be a number"):
    tasks.check_prompts(prompts)


def test_the_fingerprint_is_of_texts_answers_order_and_what_is_skipped():
  base = prompts_of(["a b", "c", "d e f g"])

  def of(prompts, max_tokens=5, skip=True):
    return tasks.check_prompts(prompts, by_words, max_tokens, skip=skip).fingerprint

  assert of(base) == of(list(base)) == of(base, skip=False) == of(base, max_tokens=4)
  others = [
    [base[0]._replace(text="a  b"), *base[1:]],
    [base[0]._replace(text=chat("a b")), *base[1:]],
    [base[0]._replace(answer=7), *base[1:]],
    [base[0]._replace(answer="0"), *base[1:]],
    [base[1]._replace(id=0), base[0]._replace(id=1), base[2]],
    base[:2],
  ]
  assert len({of(base), of(base, max_tokens=3), *map(of, others)}) == len(others) + 2


ANSWERS = [{"b": 1, "a": {"x", "y", "z"}}, (1, 2.5, None), np.arange(3), b"bytes", object(), {1: frozenset("abc")}]


def test_the_fingerprint_is_the_same_in_every_process():
  code = (
    "import test_prompt_check as t; from async_rl import tasks; from async_rl.types import Prompt\n"
    "print(tasks.check_prompts([Prompt(i, str(i), a) for i, a in enumerate(t.ANSWERS)]).fingerprint)"
  )
  found = {
    subprocess.run(
      [sys.executable, "-c", code],
      env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in (1, 2)
  }
  assert len(found) == 1


def test_every_small_task_passes(tmp_path):
  for name in ("countdown", "countdown_steps", "keywords", "sums"):
    options = {} if name == "keywords" else {"data_dir": str(tmp_path)}
    prompts = tasks.make(name, train=50, test=8, **options).prompts("train")
    assert tasks.check_prompts(prompts).skipped == ()


def test_prompts_that_are_not_left_out_keep_their_ids():
  prompts = prompts_of(["a", "a b c d", "b", "", "b"])
  check = tasks.check_prompts(prompts, by_words, 3, skip=True)
  assert [prompt.id for prompt in check.select(prompts)] == [0, 2, 4]
  assert check.describe() == ("2 of 5 prompts are left out (1 blank, 1 too long); 1 of 5 prompts repeat an earlier one")
  whole = tasks.check_prompts(prompts, by_words, 9, skip=True)
  assert whole.skipped == (3,)
  good = tasks.check_prompts(prompts[:1], by_words)
  assert good.select(prompts[:1]) == prompts[:1]
  assert good.describe() is None


def test_slices_know_their_files_and_keep_their_ids(tmp_path):
  rows = [{"question": f"question {i}", "answer": i} for i in range(6)]
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
  prompts = tasks.GSM8K(tmp_path).prompts("train")
  part = prompts[1:5][::2]
  assert [prompt.id for prompt in part] == [1, 3]
  assert [part.where(i) for i in range(2)] == [f"{tmp_path}/train.jsonl:2", f"{tmp_path}/train.jsonl:4"]
  assert list(prompts[:2]) == [prompts[0], prompts[1]]
