"""Tokenizers behind one small protocol, the only place that knows BOS, end tokens and the chat template."""

from __future__ import annotations

import datetime
import os
import pathlib
import re
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from async_rl._validation import check_choice
from async_rl.models._chat_template import TEMPLATE_DATE
from async_rl.models._chat_template import ChatTemplate
from async_rl.models._files import explained

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
  """Maps text to token ids and back.

  Attributes:
    vocab_size: the number of ids, 0 <= id < vocab_size. A padded embedding may have more rows, which never occur.
    pad_id: the id used to fill unused positions; masks come from lengths, never from this id.
    bos_id: the id that begins every prompt; `None` if the family uses none.
    stop_ids: every id that ends a completion. Supervised targets end with the first one.
  """

  vocab_size: int
  pad_id: int
  bos_id: int | None
  stop_ids: tuple[int, ...]

  def encode_prompt(self, prompt: str | Messages) -> list[int]:
    """Returns the ids of a prompt as the model expects it: with BOS, and by the chat template for a conversation."""

  def encode_prompts(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
    """Returns the ids of each prompt, as `encode_prompt` does, at once and so perhaps faster."""

  def encode_turn(self, text: str, role: str = "tool") -> list[int]:
    """Returns the ids that continue a conversation after a completion: another role's turn, then the model's opening.

    The completion is taken to end with its stop token; what the template writes after that token is included here.
    Without a chat template it is `text` alone. Markup of special tokens in `text` is text like any other.
    """

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text: nothing is added, and markup of special tokens in it is text like any other."""

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD; it never raises."""


#: Placeholders that chat templates write in the places of two contents, to see what they write around them.
_REPLY = "\ufffcreply\ufffc"
_CONTENT = "\ufffccontent\ufffc"


class _Base:
  """The code that both implementations share. They supply `_encode_plain`, `_encode_marked` and `_decode`."""

  def __init__(
    self,
    vocab_size: int,
    specials: Mapping[str, int],
    *,
    bos_id: int | None,
    eos_ids: Sequence[int],
    pad_id: int | None,
    chat_template: str | None,
    date: datetime.date,
  ):
    self.vocab_size = vocab_size
    self.bos_id = bos_id
    names = {id: name for name, id in specials.items()}
    self._names = tuple(specials)
    self._template = None
    if chat_template is not None:
      named = {"bos_token": bos_id, "eos_token": eos_ids[0] if eos_ids else None}
      variables = {key: "" if id is None else names.get(id, "") for key, id in named.items()}
      self._template = ChatTemplate(chat_template, variables, date=date)
    stops = [*eos_ids, *(specials[token] for token in END_TOKENS if token in specials)]
    if not stops:
      raise ValueError(
        f"The tokenizer has no end token: none of its special tokens is one of {', '.join(END_TOKENS)}; give eos_ids."
      )

    def written_by_template(id: int) -> bool:
      return id in names and names[id] in (chat_template or "")

    # A chat model's turn ends with the token that its template writes, which need not be its end of text.
    stops = [id for id in stops if written_by_template(id)] + [id for id in stops if not written_by_template(id)]
    self.stop_ids = tuple(dict.fromkeys(stops))
    self._special_ids = {*specials.values(), *self.stop_ids}
    self.pad_id = self.stop_ids[-1] if pad_id is None else pad_id

  def encode_prompt(self, prompt: str | Messages) -> list[int]:
    return self.encode_prompts([prompt])[0]

  def encode_prompts(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
    plain = [isinstance(prompt, str) for prompt in prompts]
    if len(set(plain)) > 1:
      return [self.encode_prompt(prompt) for prompt in prompts]
    texts = [prompt if isinstance(prompt, str) else self._render(prompt) for prompt in prompts]
    for text in texts:
      _check_unicode(text)
    return [self._with_bos(ids) for ids in self._encode_all(texts, marked=not all(plain))]

  def _render(self, messages: Messages) -> str:
    if self._template is None:
      raise ValueError("This tokenizer has no chat template: give the prompt as a string instead of messages.")
    text = self._template.render(messages)
    asked = next((m["content"].strip() for m in reversed(messages) if m["role"] == "user"), "")
    if asked not in text:
      raise ValueError(f"The chat template does not write the user's message {asked[:40]!r}; use another template.")
    return text

  def _with_bos(self, ids: list[int]) -> list[int]:
    if self.bos_id is None or ids[:1] == [self.bos_id]:  # templates may write BOS themselves
      return ids
    return [self.bos_id, *ids]

  def encode_turn(self, text: str, role: str = "tool") -> list[int]:
    if self._template is None:
      return self.encode(text)
    _check_unicode(text)
    after_reply = self._render_after_reply(role, text)
    if not any(name in text for name in self._names):
      return self._after_stop(self._encode_marked(after_reply))
    # Tool output must not be able to close its turn or open a new one.
    opening, _, closing = self._render_after_reply(role, _CONTENT).partition(_CONTENT)
    if after_reply.startswith(opening) and after_reply.endswith(closing):  # as written: trimmed, quoted, ...
      text = after_reply[len(opening) : len(after_reply) - len(closing)]
    return [*self._after_stop(self._encode_marked(opening)), *self.encode(text), *self._encode_marked(closing)]

  def _render_after_reply(self, role: str, content: str) -> str:
    """Returns the template's text between the model's reply and its next one, when `role` says `content`.

    Templates may write a reply differently once it is no longer the last (Qwen3 drops its thoughts), so the
    conversation is rendered whole and cut behind the reply.
    """
    assert self._template is not None
    messages = [
      {"role": "user", "content": "?"},
      {"role": "assistant", "content": _REPLY},
      {"role": role, "content": content},
    ]
    _, reply, after = self._template.render(messages).partition(_REPLY)
    if not reply:
      raise ValueError("The chat template does not write the model's turn, so a conversation cannot be continued.")
    return after

  def _after_stop(self, ids: list[int]) -> list[int]:
    """Drops the ids up to the stop token with which the model itself ended its turn."""
    stop = next((i for i, id in enumerate(ids) if id in self.stop_ids), None)
    if stop is None:
      raise ValueError("The chat template does not end the model's turn with a stop token, so it cannot be continued.")
    return ids[stop + 1 :]

  def decode(self, ids: Iterable[int]) -> str:
    return self._decode([i for i in map(int, ids) if i not in self._special_ids and 0 <= i < self.vocab_size])

  def encode(self, text: str) -> list[int]:
    _check_unicode(text)
    return self._encode_plain(text)

  def _encode_plain(self, text: str) -> list[int]:
    raise NotImplementedError

  def _encode_marked(self, text: str) -> list[int]:
    raise NotImplementedError

  def _encode_all(self, texts: Sequence[str], marked: bool) -> list[list[int]]:
    encode = self._encode_marked if marked else self._encode_plain
    return [encode(text) for text in texts]

  def _decode(self, ids: list[int]) -> str:
    raise NotImplementedError


def _check_unicode(text: str) -> None:
  """Raises a ValueError that shows a lone surrogate of `text`, which has no encoding in UTF-8."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    near = text[max(0, error.start - 20) : error.start + 20]
    raise ValueError(
      f"text must be valid Unicode, got a lone surrogate {text[error.start]!a} at index {error.start}, in {near!a}; "
      "repair the data, where a character was probably cut in half."
    ) from error


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
    date: datetime.date = TEMPLATE_DATE,
  ):
    """Wraps `tokenizer`.

    Args:
      tokenizer: the tokenizer; truncation and padding are switched off.
      bos_id: the id that begins every prompt; `None` if its own post-processor says so (as in Llama 3), or if there is
        none.
      eos_ids: the configured end tokens, beside the known ones of the vocabulary.
      pad_id: the id used to fill unused positions; `None` takes an end token.
      chat_template: the Jinja source of the chat template.
      date: the date that the template may write, see `ChatTemplate`.

    Raises:
      TypeError: if `tokenizer` is not of the `tokenizers` library.
    """
    if not isinstance(tokenizer, tokenizers.Tokenizer):
      raise TypeError(
        f"tokenizer must be a tokenizers.Tokenizer, got tokenizer={tokenizer!r}; "
        "use load_tokenizer for a folder or a file."
      )
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
      date=date,
    )
    self._marked = tokenizer
    self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    self._plain.encode_special_tokens = True  # takes "<|im_end|>" in a text for the characters it consists of

  def _encode_plain(self, text: str) -> list[int]:
    return self._plain.encode(text, add_special_tokens=False).ids

  def _encode_marked(self, text: str) -> list[int]:
    return self._marked.encode(text, add_special_tokens=False).ids

  def _encode_all(self, texts: Sequence[str], marked: bool) -> list[list[int]]:
    if len(texts) == 1:
      return super()._encode_all(texts, marked)
    tokenizer = self._marked if marked else self._plain
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

  def _decode(self, ids: list[int]) -> str:
    return self._plain.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer(_Base):
  """A SentencePiece model."""

  def __init__(
    self,
    model: bytes | str | os.PathLike,
    *,
    add_bos: bool = True,
    chat_template: str | None = None,
    date: datetime.date = TEMPLATE_DATE,
  ):
    """Loads a model.

    Args:
      model: a serialized model, or the path of a `.model` file.
      add_bos: whether prompts begin with the model's BOS, if it has one.
      chat_template: the Jinja source of the chat template.
      date: the date that the template may write, see `ChatTemplate`.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    with explained("the SentencePiece model" if isinstance(model, bytes) else model):
      data = model if isinstance(model, bytes) else pathlib.Path(model).read_bytes()
      proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]
      if not proto.pieces:
        raise EOFError("it has no pieces")
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
      date=date,
    )

  def _encode_plain(self, text: str) -> list[int]:
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
    lines: the corpus, in which every known character (or word) must occur.
    model_type: the kind of model: "char", "word", "bpe" (with byte fallback) or "unigram".
    vocab_size: the number of pieces; `None` takes all there are, for "char" and "word".

  Returns:
    The serialized model, for `SentencePieceTokenizer` or to be written to a `.model` file.

  >>> tokenizer = SentencePieceTokenizer(train_sentencepiece(["0123456789+="]))
  >>> tokenizer.decode(tokenizer.encode("12+34="))
  '12+34='
  """
  import io

  import sentencepiece

  check_choice("model_type", model_type, ("char", "word", "bpe", "unigram"))
  closed = model_type in ("char", "word")
  if vocab_size is None and not closed:
    raise ValueError(f"vocab_size must be given for model_type={model_type!r}; only 'char' and 'word' can count it.")
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
