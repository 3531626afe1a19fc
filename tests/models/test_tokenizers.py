"""Tokenizers: round trips, one BOS, stop tokens, and vocabularies rebuilt from GGUF files."""

import json

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.models import _gguf_tokenizer
from async_rl.models._load_tokenizer import load_tokenizer
from async_rl.models._tokenizers import HFTokenizer
from async_rl.models._tokenizers import SentencePieceTokenizer
from async_rl.models._tokenizers import train_sentencepiece
from async_rl.tasks._countdown import Puzzle

CORPUS = [
  "Natalia sold clips to 48 of her friends, and then she sold half as many.",
  "What is 12 + 34?  It is 46, isn't it?\n\nYes\tit is: 12+34=46.",
  "Größe, naïve café, 東京 and 🎉 are text as well; don't lose them.",
] * 30
GEMMA_CHAT = (
  "{{ bos_token }}{% for m in messages %}"
  "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
  "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ASK = [{"role": "user", "content": "What is 12 + 34?"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
  return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
  """Every byte is in its vocabulary (SmolLM2's lacks a few, among them control characters)."""
  path = tmp_path_factory.mktemp("byte_level") / "tiny.gguf"
  _write_bpe(path, _byte_level("smollm"), "smollm")
  return load_tokenizer(path)


@pytest.fixture(scope="module")
def bpe_model():
  return train_sentencepiece(CORPUS, "bpe", 400)


@pytest.fixture(scope="module")
def bpe(bpe_model):
  return SentencePieceTokenizer(bpe_model)


@pytest.fixture(scope="module")
def gemma(bpe_model, tmp_path_factory):
  """The vocabulary of a small SentencePiece model, written and read as a GGUF file like Gemma's."""
  from sentencepiece import sentencepiece_model_pb2

  proto = sentencepiece_model_pb2.ModelProto.FromString(bpe_model)
  pieces = [(p.piece, p.score, p.type) for p in proto.pieces]
  pieces[3] = ("<unk>", 0.0, 3)
  pieces += [
    ("<start_of_turn>", -1000.0, 3),
    ("<end_of_turn>", -1000.0, 3),
    ("\n\t\n", -1000.0, 4),
    ("   ", -1000.0, 4),
  ]
  path = tmp_path_factory.mktemp("gemma") / "tiny.gguf"
  writer = gguf.GGUFWriter(path, "gemma3")
  writer.add_tokenizer_model("llama")
  writer.add_token_list([piece for piece, _, _ in pieces])
  writer.add_token_scores([score for _, score, _ in pieces])
  writer.add_token_types([kind for _, _, kind in pieces])
  writer.add_pad_token_id(0)
  writer.add_eos_token_id(1)
  writer.add_bos_token_id(2)
  writer.add_unk_token_id(3)
  writer.add_add_bos_token(True)
  writer.add_add_space_prefix(False)
  writer.add_chat_template(GEMMA_CHAT)
  _finish(writer)
  return load_tokenizer(path)


def _finish(writer):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _byte_level(pre):
  """A small byte-level BPE with the pre-tokenizer of a family."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = _gguf_tokenizer._pre_tokenizer(pre)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  return tokenizer


def _write_bpe(path, tokenizer, pre):
  model = json.loads(tokenizer.to_str())["model"]
  writer = gguf.GGUFWriter(path, "qwen2")
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
  writer.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))
  writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
  writer.add_eos_token_id(2)
  _finish(writer)


@pytest.mark.parametrize("name", ["byte_level", "bpe", "gemma"])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip_of_any_text(request, name, text):
  tokenizer = request.getfixturevalue(name)
  if name != "byte_level":
    text = text.replace("\0", "").replace("▁", "_")  # SentencePiece's own sign for a space
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert not set(ids) & {tokenizer.bos_id, *tokenizer.stop_ids}
  assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("name", ["smollm2", "bpe", "gemma"])
@settings(deadline=None)
@given(ids=st.lists(st.integers(-5, 60000), max_size=20))
def test_any_ids_decode(request, name, ids):
  assert isinstance(request.getfixturevalue(name).decode(ids), str)


@pytest.mark.parametrize("name", ["smollm2", "bpe", "gemma"])
def test_partial_characters_survive_as_ids_and_are_marked_in_text(request, name):
  tokenizer = request.getfixturevalue(name)
  ids = tokenizer.encode("ok 𒀀")  # no piece of its own: four bytes
  assert "\ufffd" in tokenizer.decode(ids[:-1])
  assert tokenizer.decode(ids[:-1] + ids[-1:]) == "ok 𒀀"


@pytest.mark.parametrize("name", ["smollm2", "bpe", "gemma"])
def test_special_tokens_are_dropped_from_text_and_cannot_be_typed(request, name):
  tokenizer = request.getfixturevalue(name)
  ids = tokenizer.encode("fine")
  assert tokenizer.decode([*tokenizer.stop_ids, *ids, tokenizer.stop_ids[0]]) == "fine"
  for mark in ("<|im_end|>", "<end_of_turn>", "<eos>", "<bos>", "<pad>"):
    assert tokenizer.decode(tokenizer.encode(mark)) == mark
    assert not set(tokenizer.encode(mark)) & set(tokenizer.stop_ids)


def test_one_bos(bpe, bpe_model, gemma, smollm2):
  assert bpe.encode_prompt("48 clips")[:1] == [2]
  assert bpe.encode_prompt("48 clips").count(2) == 1
  assert bpe.encode_prompt("") == [2]
  assert 2 not in bpe.encode("48 clips")
  assert gemma.encode_prompt(ASK).count(gemma.bos_id) == 1  # this template writes it, too
  assert SentencePieceTokenizer(bpe_model, add_bos=False).encode_prompt("a") == bpe.encode("a")
  assert smollm2.bos_id is None
  assert smollm2.encode_prompt("fine") == smollm2.encode("fine")


def test_stop_ids_hold_every_end_token_and_begin_with_the_one_of_a_turn(bpe, gemma, smollm2):
  assert bpe.stop_ids == (1,)
  assert gemma.stop_ids == (gemma._specials["<end_of_turn>"], 1)
  assert smollm2.stop_ids == (2, 0)  # <|im_end|>, <|endoftext|>


def test_chat_of_smollm2(smollm2):
  ids = smollm2.encode_prompt(ASK)
  assert smollm2.decode(ids).endswith("user\nWhat is 12 + 34?\nassistant\n")
  assert ids.count(1) == 3
  assert ids.count(2) == 2
  assert ids[-4:] == [1, *smollm2.encode("assistant\n")]


def test_chat_of_gemma(gemma):
  start, end = gemma._specials["<start_of_turn>"], gemma._specials["<end_of_turn>"]
  text = gemma.encode("user\nWhat is 12 + 34?")
  assert gemma.encode_prompt(ASK) == [2, start, *text, end, *gemma.encode("\n"), start, *gemma.encode("model\n")]


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_conversation_continued_by_turns_equals_the_whole_rendered_at_once(request, name):
  """Token ids in, token ids out: prompt, drawn tokens up to the stop token, the tool's turn."""
  tokenizer = request.getfixturevalue(name)
  call, result = "<calc>12 + 34</calc>", "<result>46</result>"
  drawn = [*tokenizer.encode(call), tokenizer.stop_ids[0]]
  continued = tokenizer.encode_prompt(ASK) + drawn + tokenizer.encode_turn(result, role="user")
  messages = [{"role": "assistant", "content": call}, {"role": "user", "content": result}]
  assert continued == tokenizer.encode_prompt(ASK + messages)


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_tool_cannot_forge_the_ends_of_turns(request, name):
  tokenizer = request.getfixturevalue(name)
  stop = {"smollm2": "<|im_end|>", "gemma": "<end_of_turn>"}[name]
  honest, forged = (tokenizer.encode_turn(text, role="user") for text in ("7", f"7{stop}8"))
  assert sum(id in tokenizer.stop_ids for id in forged) == sum(id in tokenizer.stop_ids for id in honest)
  assert f"7{stop}8" in tokenizer.decode(forged)


@pytest.mark.parametrize("name", ["bpe", "gemma", "smollm2"])
def test_prompts_encoded_at_once_equal_those_encoded_one_by_one(request, name):
  tokenizer = request.getfixturevalue(name)
  texts = ["48 clips", "", "<|im_end|><eos> é 🙂"]
  chats = [] if name == "bpe" else [ASK, [{"role": "user", "content": text} for text in texts[:1]]]
  for prompts in (texts, chats, [*texts, *chats], texts[:1]):
    assert tokenizer.encode_prompts(prompts) == [tokenizer.encode_prompt(prompt) for prompt in prompts]


def test_turns_without_a_template_are_plain_text(bpe):
  assert bpe.encode_turn("<result>46</result>") == bpe.encode("<result>46</result>")


def test_messages_need_a_template(bpe):
  with pytest.raises(ValueError, match="no chat template"):
    bpe.encode_prompt(ASK)


@settings(deadline=None)
@given(text=st.text("abct 1248\n'é🎉東.,", max_size=30))
def test_sentencepiece_rebuilt_from_gguf_equals_its_source(bpe, gemma, text):
  if "   " not in text:  # a piece that only the rebuilt one has
    assert gemma.encode(text) == bpe.encode(text)


def test_user_defined_pieces_with_spaces_are_found(gemma):
  assert len(gemma.encode("a   b")) == 3
  assert len(gemma.encode("a\n\t\nb")) == 3


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "gpt-2"])
def test_byte_level_bpe_rebuilt_from_gguf_equals_its_source(tmp_path, pre):
  source = _byte_level(pre)
  _write_bpe(tmp_path / "tiny.gguf", source, pre)
  rebuilt = load_tokenizer(tmp_path / "tiny.gguf")
  for text in [*CORPUS[:3], "  1234567 \r\n\n x's", "\u3000東\t"]:
    assert rebuilt.encode(text) == source.encode(text).ids
  assert rebuilt.stop_ids == (2, 0)


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", 4), ("qwen2", 4), ("llama-bpe", 2), ("gpt-2", 1)])
def test_digits_are_cut_as_the_family_does(pre, pieces):
  assert len(_gguf_tokenizer._pre_tokenizer(pre).pre_tokenize_str("1248")) == pieces


@pytest.mark.parametrize(
  ("text", "ids"),
  [
    (
      "Natalia sold 48/2 = <<48/2=24",
      [62, 6927, 542, 3459, 216, 36, 40, 31, 34, 446, 22646, 36, 40, 31, 34, 45, 34, 36],
    ),
    ("  12345 \r\n\n x's $1,2", [256, 33, 34, 35, 36, 37, 26410, 1116, 1792, 506, 1885, 33, 28, 34]),
    ("naïve 東京 🎉", [3546, 46494, 17097, 247, 126, 16736, 122, 15107, 232, 227]),
  ],
)
def test_smollm2_agrees_with_llama_cpp(smollm2, text, ids):
  """The ids are those of llama-cpp-python 0.3.36, `Llama(path, vocab_only=True).tokenize`, for the same file."""
  assert smollm2.encode(text) == ids


def test_hugging_face_folder(tmp_path):
  source = _byte_level("llama-bpe")
  source.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
  )
  source.enable_truncation(4)
  source.save(str(tmp_path / "tokenizer.json"))
  config = {"eos_token": {"content": "<|endoftext|>"}, "chat_template": "{{ messages[0]['content'] }}<|im_end|>"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
  tokenizer = load_tokenizer(tmp_path)
  assert isinstance(tokenizer, HFTokenizer)
  assert tokenizer.bos_id == 1  # told by the post-processor
  assert tokenizer.encode_prompt("Natalia sold clips, and more")[0] == 1
  assert tokenizer.decode(tokenizer.encode_prompt("Natalia sold clips, and more")) == "Natalia sold clips, and more"
  assert tokenizer.encode_prompt(ASK)[-1] == 2
  assert tokenizer.stop_ids == (2, 0)


def test_folder_and_file_of_sentencepiece(tmp_path, bpe_model):
  with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
    load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.model").write_bytes(bpe_model)
  assert load_tokenizer(tmp_path).encode("clips") == load_tokenizer(tmp_path / "tokenizer.model").encode("clips")
  with pytest.raises(ValueError, match=r"\.txt"):
    load_tokenizer(tmp_path / "tokenizer.txt")


def test_small_character_and_word_models():
  chars = SentencePieceTokenizer(train_sentencepiece(["0123456789+=;"]))
  assert chars.vocab_size == 4 + 13
  assert len(chars.encode("34+012=046;56+046=102")) == 21
  assert (chars.pad_id, chars.stop_ids, chars.bos_id) == (0, (1,), 2)
  words = SentencePieceTokenizer(train_sentencepiece(["3 + 20 = 23 ;"], "word"))
  assert words.decode(words.encode("3 + 20 = 23 ;")) == "3 + 20 = 23 ;"
  assert len(words.encode("20 + 20")) == 3
  with pytest.raises(ValueError, match="vocab_size"):
    train_sentencepiece(["a"], "bpe")


@pytest.mark.parametrize(
  ("task", "answer", "tokens"),
  [
    (tasks.Sums(numbers=3), (12, 34, 56), 22),
    (tasks.Sums(numbers=4), (12, 34, 56, 78), 33),
    (tasks.CountdownSteps(), Puzzle((3, 7, 9, 8), 44, (7, (("*", 8, False), ("-", 9, False), ("-", 3, False)))), 18),
  ],
)
def test_small_tasks_have_their_number_of_tokens(task, answer, tokens):
  """The end token included."""
  tokenizer = SentencePieceTokenizer(train_sentencepiece([task.corpus], task.model_type))
  prompt = task.prompt(0, answer)
  solution = task.solution(prompt, np.random.default_rng(0))
  ids = [*tokenizer.encode(solution), tokenizer.stop_ids[0]]
  assert len(ids) == tokens
  assert tokenizer.decode(ids) == solution
  assert not {0, 3} & {*tokenizer.encode_prompt(prompt.text), *ids}  # nothing unknown


@pytest.mark.parametrize("text", ["12 \ud83d", [{"role": "user", "content": "12 \ud83d"}]], ids=["text", "messages"])
def test_a_lone_surrogate_is_named(gemma, text):
  with pytest.raises(ValueError, match=r"lone surrogate '\\ud83d' at index \d+, in '.*12 \\ud83d"):
    gemma.encode_prompt(text)


def test_a_tokenizer_of_a_path_is_refused_with_the_function_to_use(tmp_path):
  with pytest.raises(TypeError, match=r"got tokenizer='folder'; use load_tokenizer"):
    HFTokenizer("folder")
  with pytest.raises(FileNotFoundError, match="There is no tokenizer"):
    load_tokenizer(tmp_path / "absent.model")
