"""Tokenizers behind one small protocol, the only place that knows BOS, end tokens and the chat template."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import tokenizers

from async_rl.models._chat import ChatTemplate

Messages = Sequence[Mapping[str, str]]

#: Tokens that end a text or a turn in the known families. Whichever of them a vocabulary has as a special token stop
#: a completion: a chat model may end its turn with another one than the configured end of text.
END_TOKENS = (
  "<|im_end|>",  # SmolLM2, Qwen
  "<|endoftext|>",
  "<|eot_id|>",  # Llama 3
  "<|eom_id|>",
  "<|end_of_text|>",
  "<end_of_turn>",  # Gemma
  "<eos>",
  "</s>",
)


class Tokenizer(Protocol):
  """Text to token ids and back.

  Attributes:
    vocab_size: number of ids, 0 <= id < vocab_size. A padded embedding may have more rows; those never occur.
    pad_id: filler; masks come from lengths, never from this id.
    bos_id: begins every prompt; None if the family uses none.
    stop_ids: every id that ends a completion. The first is the one that supervised targets end with.
  """

  vocab_size: int
  pad_id: int
  bos_id: int | None
  stop_ids: tuple[int, ...]

  def encode_prompt(self, prompt: str | Messages) -> list[int]:
    """The ids of a prompt as the model expects it: with BOS, and with the chat template if it is a conversation."""

  def encode_turn(self, text: str, role: str = "tool") -> list[int]:
    """The ids that continue a conversation after a completion: another's turn, then the opening of the model's next.

    The completion is taken to end with its stop token; what the template writes after that token is included here.
    Without a chat template it is `text` alone. Markup of special tokens in `text` is text like any other.
    """

  def encode(self, text: str) -> list[int]:
    """The ids of plain text: nothing is added, and markup of special tokens in it is text like any other."""

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD; it never raises."""


#: Stands for a text that is encoded by itself.
_PLACE = "\ufffctext\ufffc"


class _Base:
  """What both implementations share. They supply `encode`, `_encode_marked` and `_decode`."""

  def __init__(
    self,
    vocab_size: int,
    specials: Mapping[str, int],
    *,
    bos_id: int | None,
    eos_ids: Sequence[int],
    pad_id: int | None,
    chat_template: str | None,
  ):
    self.vocab_size = vocab_size
    self.bos_id = bos_id
    names = {id: name for name, id in specials.items()}
    self._names = tuple(specials)
    self._template = None
    if chat_template is not None:
      named = {"bos_token": bos_id, "eos_token": eos_ids[0] if eos_ids else None}
      variables = {key: "" if id is None else names.get(id, "") for key, id in named.items()}
      self._template = ChatTemplate(chat_template, variables)
    stops = [*eos_ids, *(specials[token] for token in END_TOKENS if token in specials)]
    # A chat model's turn ends with the token that its template writes, which need not be its end of text.
    stops.sort(key=lambda id: names.get(id, "\0") not in (chat_template or ""))
    if not stops:
      raise ValueError(f"the tokenizer has no end token: none of its special tokens is one of {', '.join(END_TOKENS)}")
    self.stop_ids = tuple(dict.fromkeys(stops))
    self._special_ids = {*specials.values(), *self.stop_ids}
    self.pad_id = self.stop_ids[-1] if pad_id is None else pad_id

  def encode_prompt(self, prompt: str | Messages) -> list[int]:
    if isinstance(prompt, str):
      ids = self.encode(prompt)
    elif self._template is None:
      raise ValueError("this tokenizer has no chat template: give the prompt as a string instead of messages")
    else:
      ids = self._encode_marked(self._template.render(prompt))
    if self.bos_id is None:
      return ids
    return [self.bos_id, *ids[ids[:1] == [self.bos_id] :]]  # templates that write BOS themselves

  def encode_turn(self, text: str, role: str = "tool") -> list[int]:
    if self._template is None:
      return self.encode(text)
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    closed = self._template.render(before, add_generation_prompt=False)
    marked = any(name in text for name in self._names)
    content = _PLACE if marked else text
    whole = self._template.render([*before, {"role": role, "content": content}])
    ids = self._encode_marked(closed)
    stop = max((i for i, id in enumerate(ids) if id in self.stop_ids), default=None)
    if stop is None or not whole.startswith(closed):
      raise ValueError("the chat template does not end the model's turn with a stop token, so it cannot be continued")
    if not marked:
      return self._encode_marked(whole)[stop + 1 :]
    # Nobody who speaks through a tool may end its turn or open another one.
    opening, _, closing = whole.partition(_PLACE)
    return [*self._encode_marked(opening)[stop + 1 :], *self.encode(text), *self._encode_marked(closing)]

  def decode(self, ids: Iterable[int]) -> str:
    return self._decode([i for i in map(int, ids) if i not in self._special_ids and 0 <= i < self.vocab_size])

  def encode(self, text: str) -> list[int]:
    raise NotImplementedError

  def _encode_marked(self, text: str) -> list[int]:
    raise NotImplementedError

  def _decode(self, ids: list[int]) -> str:
    raise NotImplementedError


class HFTokenizer(_Base):
  """A tokenizer of the `tokenizers` library, as in a Hugging Face folder's tokenizer.json."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    *,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    chat_template: str | None = None,
  ):
    """Wraps `tokenizer`.

    Args:
      tokenizer: the tokenizer; truncation and padding are switched off.
      bos_id: begins every prompt; None if its own post-processor tells (as in Llama 3), or if there is none.
      eos_ids: configured end tokens, beside the known ones of the vocabulary.
      pad_id: filler; None takes an end token.
      chat_template: Jinja source.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    specials = {token.content: id for id, token in added.items() if token.special}
    if bos_id is None:
      bos_id = next((id for id in tokenizer.encode("", add_special_tokens=True).ids if id not in eos_ids), None)
    super().__init__(
      max(tokenizer.get_vocab().values()) + 1,
      specials,
      bos_id=bos_id,
      eos_ids=eos_ids,
      pad_id=pad_id,
      chat_template=chat_template,
    )
    self._marked = tokenizer
    self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    self._plain.encode_special_tokens = True  # takes "<|im_end|>" in a text for the characters it consists of

  def encode(self, text: str) -> list[int]:
    return self._plain.encode(text, add_special_tokens=False).ids

  def _encode_marked(self, text: str) -> list[int]:
    return self._marked.encode(text, add_special_tokens=False).ids

  def _decode(self, ids: list[int]) -> str:
    return self._plain.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer(_Base):
  """A SentencePiece model."""

  def __init__(self, model: bytes | str | os.PathLike, *, add_bos: bool = True, chat_template: str | None = None):
    """Loads a model.

    Args:
      model: a serialized model, or the path of a `.model` file.
      add_bos: whether prompts begin with the model's BOS, if it has one.
      chat_template: Jinja source.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    data = model if isinstance(model, bytes) else pathlib.Path(model).read_bytes()
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]
    kinds = proto.SentencePiece
    for piece in proto.pieces:  # some families ship their turn tokens as text that users could type
      if piece.type == kinds.USER_DEFINED and re.fullmatch(r"<(start|end)_of_turn>|<\|im_(start|end)\|>", piece.piece):
        piece.type = kinds.CONTROL
    self._sp = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    specials = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type == kinds.CONTROL}
    self._specials = specials
    self._marks = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
    bos, eos, pad = self._sp.bos_id(), self._sp.eos_id(), self._sp.pad_id()
    super().__init__(
      len(proto.pieces),
      specials,
      bos_id=bos if add_bos and bos >= 0 else None,
      eos_ids=[eos] if eos >= 0 else [],
      pad_id=pad if pad >= 0 else None,
      chat_template=chat_template,
    )

  def encode(self, text: str) -> list[int]:
    return self._sp.encode(text)

  def _encode_marked(self, text: str) -> list[int]:
    ids, end = [], 0
    for mark in self._marks.finditer(text):
      ids += [*self.encode(text[end : mark.start()]), self._specials[mark.group()]]
      end = mark.end()
    return ids + self.encode(text[end:])

  def _decode(self, ids: list[int]) -> str:
    return self._sp.decode(ids)


def train_sentencepiece(lines: Iterable[str], model_type: str = "char", vocab_size: int | None = None) -> bytes:
  """Trains a SentencePiece model that keeps the text as it is, for small tasks and tests.

  The ids 0 to 3 are padding, end, BOS and unknown.

  Args:
    lines: the corpus; every character (or word) that is to be known must occur in it.
    model_type: "char", "word", "bpe" (with byte fallback) or "unigram".
    vocab_size: number of pieces; "char" and "word" take all there are when it is None.

  Returns:
    The serialized model, for `SentencePieceTokenizer` or to be written to a `.model` file.

  >>> tokenizer = SentencePieceTokenizer(train_sentencepiece(["0123456789+="]))
  >>> tokenizer.decode(tokenizer.encode("12+34="))
  '12+34='
  """
  import io

  import sentencepiece

  closed = model_type in ("char", "word")
  if vocab_size is None and not closed:
    raise ValueError(f"vocab_size is required for model_type={model_type!r}")
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines),
    model_writer=model,
    model_type=model_type,
    vocab_size=vocab_size or 1 << 20,
    hard_vocab_limit=False,
    use_all_vocab=closed and vocab_size is None,
    character_coverage=1.0,
    byte_fallback=model_type == "bpe",
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=model_type == "word",
    pad_id=0,
    eos_id=1,
    bos_id=2,
    unk_id=3,
    pad_piece="<pad>",
    eos_piece="<eos>",
    bos_piece="<bos>",
    minloglevel=2,
    num_threads=1,
  )
  return model.getvalue()


def load_tokenizer(path: str | os.PathLike) -> HFTokenizer | SentencePieceTokenizer:
  """Loads the tokenizer at `path`: a `.gguf` or `.model` file, or a Hugging Face folder.

  Raises:
    FileNotFoundError: if the folder holds neither tokenizer.json nor tokenizer.model.
    ValueError: if the file is of another kind.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _from_folder(path)
  if path.suffix == ".model":
    return SentencePieceTokenizer(path)
  if path.suffix == ".gguf":
    import gguf

    from async_rl.models._gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(gguf.GGUFReader(path))
  raise ValueError(f"cannot tell the tokenizer of {str(path)!r}: give a .gguf or .model file or a folder")


def _from_folder(folder: pathlib.Path) -> HFTokenizer | SentencePieceTokenizer:
  config = _read_json(folder / "tokenizer_config.json")
  template = config.get("chat_template")
  if isinstance(template, list):  # several named ones
    template = {entry["name"]: entry["template"] for entry in template}.get("default")
  if (folder / "chat_template.jinja").exists():
    template = (folder / "chat_template.jinja").read_text()
  if (folder / "tokenizer.json").exists():
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = _read_json(folder / "generation_config.json").get("eos_token_id", [])
    eos = [_id(tokenizer, config.get("eos_token")), *(eos if isinstance(eos, list) else [eos])]
    return HFTokenizer(
      tokenizer,
      bos_id=_id(tokenizer, config.get("bos_token")) if config.get("add_bos_token") else None,
      eos_ids=[id for id in eos if id is not None],
      pad_id=_id(tokenizer, config.get("pad_token")),
      chat_template=template,
    )
  if (folder / "tokenizer.model").exists():
    return SentencePieceTokenizer(
      folder / "tokenizer.model", add_bos=config.get("add_bos_token", True), chat_template=template
    )
  raise FileNotFoundError(f"{str(folder)!r} holds neither tokenizer.json nor tokenizer.model")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.exists() else {}


def _id(tokenizer: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> int | None:
  """The id of a token that a configuration names, as text or as an object with its content."""
  if token is None:
    return None
  return tokenizer.token_to_id(token if isinstance(token, str) else token["content"])
