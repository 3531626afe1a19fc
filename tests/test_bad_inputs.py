"""Bad inputs that users bring, one table: where each enters, and the error that names it, its value and the remedy."""

import dataclasses
import fractions
import gzip
import json
import math
import pathlib
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tiny import tiny

from async_rl import models
from async_rl import rollout
from async_rl import runtime
from async_rl import tasks
from async_rl import types

GOLDEN = pathlib.Path(__file__).parent / "models" / "golden" / "llama3"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"
RECORD = b'{"question": "a", "answer": "1"}'
GENERATION = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
ON_TPUS = dataclasses.replace(tiny().policy, attention="ragged")
HTML = b"<!DOCTYPE html><html>404: not found</html>"


# Where inputs enter. Each function returns what is called with a folder of the test's own.


def option(**values):
  return lambda folder: tiny(**{"run_dir": str(folder / "run"), **values})


def run(**values):
  return lambda folder: runtime.train(tiny(**{"run_dir": str(folder / "run"), **values}))


def schedule(content):
  def read(folder):
    (folder / "schedule.jsonl").write_bytes(content)
    return list(rollout.read_schedule(folder / "schedule.jsonl"))

  return read


def gsm8k(content):
  """Content of the file, or an answer of one record."""

  def read(folder):
    lines = content if isinstance(content, bytes) else json.dumps({"question": "How many?", "answer": content}).encode()
    (folder / "train.jsonl").write_bytes(lines)
    return list(tasks.GSM8K(folder=folder).prompts("train"))

  return read


class Prompted(tasks.Sums):
  """Sums with other prompts, of both splits."""

  def __init__(self, train, test=()):
    super().__init__()
    object.__setattr__(self, "splits", {"train": train, "test": test})

  def prompts(self, split):
    return self.splits[split]


def task(train, **options):
  """A run of a task of the user's own, which ends before anything is compiled."""
  return lambda folder: tiny(run_dir=str(folder), task=Prompted(train), **options).make_stage_inputs(rewards=None)


def prompts(*texts):
  return lambda folder: tasks.check_prompts([types.Prompt(i, text, None) for i, text in enumerate(texts)])


def weights(change):
  """A folder of weights that was changed in place."""

  def load(folder):
    shutil.copytree(GOLDEN, folder / "weights")
    change(folder / "weights")
    return models.load_params(models.open_checkpoint(folder / "weights"))

  return load


def config(content=None, without=(), **changes):
  """Another config.json: its content, or changes of the right one."""

  def change(folder):
    right = json.loads((folder / "config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in right.items() if key not in without})
    (folder / "config.json").write_text(text if content is None else content)

  return weights(change)


def weight_file(content, name="model.safetensors"):
  return weights(lambda folder: (folder / name).write_bytes(content(folder / name) if callable(content) else content))


def tensors(change):
  def rewrite(folder):
    content = safetensors.numpy.load_file(folder / "model.safetensors")
    change(content)
    safetensors.numpy.save_file(content, folder / "model.safetensors")

  return weights(rewrite)


def gguf(content):
  def load(folder):
    (folder / "model.gguf").write_bytes(content)
    return models.open_checkpoint(folder / "model.gguf")

  return load


def tokenizer(**files):
  """A tokenizer's folder with other files; names without their suffix .json."""

  def load(folder):
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    vocabulary.add_special_tokens(["<eos>"])
    vocabulary.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
      data = content if isinstance(content, bytes) else json.dumps(content).encode()
      (folder / f"{name}.json").write_bytes(data)
    return models.load_tokenizer(folder)

  return load


def template(source):
  def render(folder):
    (folder / "chat_template.jinja").write_bytes(source.encode() if isinstance(source, str) else source)
    return tokenizer()(folder).encode_prompt([{"role": "user", "content": "a"}])

  return render


def sentencepiece(content):
  def load(folder):
    (folder / "tokenizer.model").write_bytes(content)
    return models.load_tokenizer(folder / "tokenizer.model")

  return load


def set_dtype(dtype):
  return tensors(lambda content: content.update({name: value.astype(dtype) for name, value in content.items()}))


def spoil_norm(content):
  content["model.norm.weight"] = np.full_like(content["model.norm.weight"], np.nan)


def row(name, enter, words, kind=ValueError):
  """An input, where it enters, the words of the error in their order, and its kind."""
  return pytest.param(enter, words, kind, id=name)


TABLE = [
  # Options
  row("a switch as a text", option(overwrite="false"), "True or False, got overwrite='false'"),
  row("another switch as a text", option(skip_bad_prompts="yes"), "got skip_bad_prompts='yes'"),
  row("a switch for a number", option(groups=True), "an integer at least 1, got groups=True"),
  row("a number as a text", option(steps="10"), "an integer at least 1, got steps='10'"),
  row("a rate as a text", option(learning_rate="1e-3"), "must be a number, got learning_rate='1e-3'"),
  row("a negative whole rate", option(learning_rate=-1), "must be a number above 0, got learning_rate=-1"),
  row("a lag that is no whole number", option(max_lag=2.0), "got max_lag=2.0"),
  row("no folder", option(run_dir=None), "must be a text, got run_dir=None"),
  row("a folder of spaces", option(run_dir="  "), "must name a folder, .* got run_dir='  '"),
  row("a folder with a NUL", option(run_dir="a\0b"), r"printable characters, got run_dir='a\\x00b'"),
  row("a temperature beyond float32", option(temperature=1e-40), "at least 0.001, got temperature=1e-40"),
  row("an evaluation nearly greedy", option(eval_temperature=1e-9), "eval_temperature=1e-09; 0 is greedy"),
  row("an infinite evaluation", option(eval_temperature=math.inf), "got eval_temperature=inf"),
  row("a mode in capitals", option(mode="Async"), "one of 'async', .* got mode='Async'"),
  row("a lag of nothing", option(lag=None), "must be a text, got lag=None"),
  row("a folder as schedule", option(lag="."), "schedule.jsonl of a run, got lag='.', which is no file"),
  row(
    "a backend of attention of other devices", run(policy=ON_TPUS), "attention='ragged' needs TPUs, got cpu; .* 'auto'"
  ),
  row("too few prompts", run(epochs=1, groups=64, slots=128, train_prompts=32), "give 32 groups, .* groups=64"),
  # Schedules
  row("a number in a schedule", schedule(b"5\n"), "line 1: '5.* is not an event"),
  row("an object in a schedule", schedule(b'["chunk"]\n{"a": 1}\n'), "line 2: .* is not an event"),
  row("an unknown event", schedule(b'["dance", 1]\n'), '\'."dance", 1.* is not an event'),
  row("an event cut short", schedule(b'["submit"]\n'), '\'."submit".* is not an event'),
  row("a version as a text", schedule(b'["weights", "0"]\n'), "is not an event .* give the schedule.jsonl"),
  row("a binary schedule", schedule(b"\xff\xfe\0\n"), "line 1: .* is not an event"),
  # Data files
  row("UTF-16", gsm8k("7".encode("utf-16")), "train.jsonl holds UTF-16, .* save it as UTF-8"),
  row("a compressed file", gsm8k(gzip.compress(b"{}")), "holds compressed data, .* decompress it"),
  row("a Git LFS pointer", gsm8k(LFS_POINTER), "holds a Git LFS pointer, .* `git lfs pull`"),
  row("a Parquet table", gsm8k(b"PAR1\x15"), "holds a Parquet table, .* convert it"),
  row("an array of objects", gsm8k(b"[" + RECORD + b",\n" + RECORD + b"]"), ":1: .* one whole object"),
  row("comma-separated values", gsm8k(b"question,answer\na,1\n"), ":1: not JSON: .* one whole object"),
  row("a page in place of data", gsm8k(HTML), "train.jsonl:1: not JSON"),
  row("fields in capitals", gsm8k(b'{"Question": "a", "Answer": "1"}'), r"missing: \['question', 'answer'\]"),
  row("a question that is a list", gsm8k(b'{"question": ["a"], "answer": "1"}'), r"'question' .* got \['a'\]"),
  row("several answers", gsm8k(["72"]), r"train.jsonl:1: field 'answer' .* got \['72'\]"),
  row("a yes for an answer", gsm8k(True), "field 'answer' must be a text or a number, got True"),
  row("a range for an answer", gsm8k("#### 3-4"), "field 'answer' .* got '#### 3-4'"),
  row("a date for an answer", gsm8k("#### 2020-01-02"), "field 'answer' .* got '#### 2020-01-02'"),
  row("a division by zero", gsm8k("#### 1/0"), "field 'answer' .* got '#### 1/0'"),
  row("Roman numerals", gsm8k("#### IV"), "field 'answer' .* got '#### IV'"),
  # Prompts
  row("a prompt of bytes", prompts("a", b"b"), "prompt 1: its text must be a string or .* got b'b'"),
  row("a message without content", prompts([{"role": "user"}]), "role and content are strings"),
  row("a content of parts", prompts([{"role": "user", "content": [{"text": "a"}]}]), "content are strings, got"),
  row("prompts that come once", task(iter([])), "must be a sequence, .* got list_iterator"),
  row("no prompts at all", task(None), "must be a sequence, .* got NoneType"),
  row("prompts that are texts", task(["1+1"]), "prompt 0: it must be a types.Prompt, got '1.1'"),
  row("prompts that are records", task([{"text": "1+1"}]), "prompt 0: it must be a types.Prompt, got {'text'"),
  row("ids that are texts", task([types.Prompt("0", "1+1", 2)]), "item 0 has id '0'; ids must be the positions"),
  row(
    "no test prompts", task([types.Prompt(0, "1+1", 2)], eval_prompts=4), "no test prompts, got eval_prompts=4; .* 0"
  ),
  # config.json
  row("an empty config.json", config(""), "config.json cannot be read .* fetch it again"),
  row("a list as config.json", config("[]"), "config.json cannot be read .*a list, not an object"),
  row("a config without widths", config(without=["hidden_size"]), "config.json: hidden_size must be given"),
  row("a width as a text", config(hidden_size="32"), "config.json: .*hidden_size.* got hidden_size='32'"),
  row("no layers", config(num_hidden_layers=0), "got num_layers=0"),
  row("no key heads", config(num_key_value_heads=0), "got num_kv_heads=0"),
  row("an epsilon of nan", config(rms_norm_eps=math.nan), "above 0, got norm_eps=nan"),
  row("tying as a text", config(tie_word_embeddings="false"), "got tie_embeddings='false'"),
  row("a text_config of null", config(text_config=None), "must be an object, got text_config=None"),
  row("two model types", config(model_type=["llama"]), r"model_type \['llama'\] is not supported"),
  row(
    "a scaling without factor",
    config(rope_parameters=None, rope_scaling={"rope_type": "linear"}),
    "rope_scaling of type 'linear' lacks factor",
  ),
  row(
    "a scaling by zero",
    config(rope_parameters=None, rope_scaling={"rope_type": "linear", "factor": 0}),
    "above 0, got factor=0",
  ),
  # Weights
  row("a file cut off", weight_file(lambda p: p.read_bytes()[:-100]), "model.safetensors cannot be read"),
  row("an empty file", weight_file(b""), "model.safetensors cannot be read .* fetch it again"),
  row("a pointer to weights", weight_file(LFS_POINTER), "model.safetensors is a Git LFS pointer .* lfs pull"),
  row("an empty index", weight_file(b"{}", "model.safetensors.index.json"), "index.json lacks weight_map"),
  row(
    "pickled weights",
    weights(lambda f: (f / "model.safetensors").rename(f / "m.bin")),
    "lacks model.safetensors",
    FileNotFoundError,
  ),
  row("weights of nan", tensors(spoil_norm), "model.norm.weight holds values that are not finite"),
  row("integer weights", set_dtype(np.int8), "dtype I8, as quantized weights do; use .* BF16"),
  row("8-bit floats", set_dtype(ml_dtypes.float8_e4m3fn), "dtype F8_E4M3, as quantized weights do"),
  row("an empty GGUF file", gguf(b""), "model.gguf cannot be read .* fetch it again"),
  row("a page as GGUF", gguf(HTML), "model.gguf cannot be read .*magic"),
  row("a pointer as GGUF", gguf(LFS_POINTER), "model.gguf is a Git LFS pointer"),
  # Tokenizers
  row("a page as tokenizer", tokenizer(tokenizer=HTML), "tokenizer.json cannot be read"),
  row("a broken configuration", tokenizer(tokenizer_config=b"{"), "tokenizer_config.json cannot be read"),
  row("an unknown end", tokenizer(tokenizer_config={"eos_token": "</s>"}), "eos_token='</s>', which is no token"),
  row("an end beyond the vocabulary", tokenizer(generation_config={"eos_token_id": 9}), "below 2, got eos_token_id=9"),
  row("a negative end", tokenizer(generation_config={"eos_token_id": -1}), "eos_token_id=-1; see .*generation_config"),
  row("a template of a number", tokenizer(tokenizer_config={"chat_template": 5}), "must be a text, got 5"),
  row(
    "templates without default", tokenizer(tokenizer_config={"chat_template": [{"name": "x"}]}), "none named 'default'"
  ),
  row("an empty SentencePiece model", sentencepiece(b""), "tokenizer.model cannot be read .*no pieces"),
  row("a text as SentencePiece", sentencepiece(b"hello, no model"), "tokenizer.model cannot be read"),
  # Chat templates
  row("a template in Latin-1", template(b"\xe9"), "chat_template.jinja cannot be read .*utf-8"),
  row("a template that divides by zero", template("{{ 1 / 0 }}"), "fails on the messages: ZeroDivisionError"),
  row("a template that adds text to numbers", template("{{ 1 + 'a' }}"), "fails on the messages: TypeError"),
  row("a template without end", template("{% for i in range(10**9) %}x{% endfor %}"), "fails on .* OverflowError"),
  row("a template that calls itself", template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "RecursionError"),
  row("a template of other files", template("{% include 'x' %}"), "The chat template fails on the messages"),
  row("a template of fixed text", template("Hello<eos>"), "does not write the user's message 'a'"),
  row("an empty template", template(""), "does not write the user's message 'a'"),
]


@pytest.mark.parametrize(("enter", "words", "kind"), TABLE)
def test_a_bad_input_is_refused_in_one_sentence(tmp_path, enter, words, kind):
  with pytest.raises(kind, match=words) as error:
    enter(tmp_path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("enter", "holds"),
  [
    pytest.param(config("\ufeff" + (GOLDEN / "config.json").read_text()), lambda params: "layers" in params, id="BOM"),
    pytest.param(gsm8k(RECORD + b"\r" + RECORD), lambda prompts: len(prompts) == 2, id="lines that end in CR"),
    pytest.param(
      gsm8k("#### minus 5"), lambda p: tasks.GSM8K().reward(p[0], "so -5", "stop") == 1, id="minus in words"
    ),
    pytest.param(template(GENERATION), lambda ids: ids == [0], id="a template with generation blocks"),
  ],
)
def test_an_unusual_input_is_read(tmp_path, enter, holds):
  assert holds(enter(tmp_path))


class Mute(Exception):
  """An error whose text cannot be had."""

  def __str__(self):
    raise ZeroDivisionError


class Rewards:
  """A task that rewards a sample with a value, or raises it."""

  name = "rewards"

  def __init__(self, value):
    self._value = value

  def reward(self, prompt, text, finish):
    if isinstance(self._value, BaseException):
      raise self._value
    return self._value


def judged(value):
  with tasks.RewardPool(Rewards(value), workers=0) as pool:
    return pool.submit(types.Prompt(0, "a", None), "text", types.STOP).result()


@pytest.mark.parametrize(
  ("value", "reason"),
  [
    (None, "raised TypeError: .* not 'NoneType'"),
    (1j, "raised TypeError: .* not 'complex'"),
    ((1.0, "right"), "raised TypeError: .* not 'tuple'"),
    ({"reward": 1.0}, "raised TypeError: .* not 'dict'"),
    (np.array([1.0, 0.0]), "raised TypeError"),
    ("full marks", "raised ValueError: .*'full marks'"),
    (np.float64(1e39), r"non-finite reward 1e\+39"),
    (-math.inf, "non-finite reward -inf"),
    (10**400, "raised OverflowError"),
    (MemoryError(), "raised MemoryError"),
    (StopIteration(), "raised StopIteration"),
    (ValueError("two\nlines"), "raised ValueError: two lines"),
    (Mute(), r"raised Mute: \(its text raises ZeroDivisionError\)"),
  ],
)
def test_a_reward_of_no_use_fails_its_sample_with_a_reason_of_one_line(value, reason):
  result = judged(value)
  assert result.failed
  assert result.value == 0.0
  assert re.match(reason, result.reason)
  assert "\n" not in result.reason


@pytest.mark.parametrize("value", [True, "0.5", fractions.Fraction(1, 2), np.float32(-3), np.array(0.5)])
def test_any_number_is_a_reward(value):
  assert judged(value) == tasks.RewardResult(float(value))
