"""Tokenizers rebuilt from the vocabulary inside a GGUF file."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers

from async_rl.models._chat_template import TEMPLATE_DATE
from async_rl.models._tokenizers import HFTokenizer
from async_rl.models._tokenizers import SentencePieceTokenizer

# Kinds of tokens in `tokenizer.ggml.token_type`; they are those of SentencePiece.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

#: How the families cut text before byte-level BPE, by `tokenizer.ggml.pre`. The patterns are those of their
#: tokenizer.json files; they differ in how many digits make one piece.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(reader: Any, date: datetime.date = TEMPLATE_DATE) -> HFTokenizer | SentencePieceTokenizer:
  """Rebuilds the tokenizer of an open `gguf.GGUFReader`.

  Byte-level BPE (`tokenizer.ggml.model` "gpt2") comes from tokens and merges, SentencePiece ("llama") from tokens and
  scores.

  Raises:
    ValueError: if the kind of vocabulary is not known.
  """
  field = reader.fields.get

  def get(name: str, default: Any = None) -> Any:
    found = field(f"tokenizer.{name}")
    return default if found is None else found.contents()

  kind = get("ggml.model")
  if kind == "gpt2":
    return _byte_level_bpe(get, date)
  if kind == "llama":
    return SentencePieceTokenizer(
      _sentencepiece_model(get),
      add_bos=get("ggml.add_bos_token", True),
      chat_template=get("chat_template"),
      date=date,
    )
  raise ValueError(f"tokenizer.ggml.model must be 'gpt2' or 'llama', got {kind!r}; use the folder with tokenizer.json.")


def _byte_level_bpe(get: Callable[..., Any], date: datetime.date) -> HFTokenizer:
  pre = get("ggml.pre", "gpt-2")
  tokens, types = get("ggml.tokens"), get("ggml.token_type")
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: id for id, token in enumerate(tokens)},
      merges=[tuple(merge.split(" ")) for merge in get("ggml.merges")],
      ignore_merges=pre == "llama-bpe",
    )
  )
  tokenizer.pre_tokenizer = _pre_tokenizer(pre)
  tokenizer.decoder = decoders.ByteLevel()
  if pre == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    found = [token for token, type in zip(tokens, types) if type == kind]
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in found])
  ends = [get("ggml.eos_token_id"), get("ggml.eot_token_id")]
  return HFTokenizer(
    tokenizer,
    bos_id=get("ggml.bos_token_id") if get("ggml.add_bos_token", pre == "llama-bpe") else None,
    eos_ids=[id for id in ends if id is not None],
    pad_id=get("ggml.padding_token_id"),
    chat_template=get("chat_template"),
    date=date,
  )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  match pre:
    case "gpt-2" | "default":
      return gpt2
    case "smollm":
      return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    case "qwen2" | "llama-bpe":
      pattern = tokenizers.Regex(_WORDS.format(digits="" if pre == "qwen2" else "{1,3}"))
      return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
  raise ValueError(f"tokenizer.ggml.pre must be a known family's, got {pre!r}; use the folder with tokenizer.json.")


def _sentencepiece_model(get: Callable[..., Any]) -> bytes:
  """Builds a SentencePiece model of the file's pieces. Text is kept as it is; a leading space only if asked for."""
  from sentencepiece import sentencepiece_model_pb2

  proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
  for token, score, type in zip(get("ggml.tokens"), get("ggml.scores"), get("ggml.token_type")):
    # Inside a model a space is written "▁", but converters write it plainly in user-defined pieces.
    piece = token.replace(" ", "▁") if type == _USER_DEFINED else token
    proto.pieces.add(piece=piece, score=score, type=type)
  trainer = proto.trainer_spec
  trainer.model_type = trainer.BPE
  trainer.byte_fallback = True
  for role in ("bos", "eos", "unk", "pad"):
    id = get({"unk": "ggml.unknown_token_id", "pad": "ggml.padding_token_id"}.get(role, f"ggml.{role}_token_id"), -1)
    setattr(trainer, f"{role}_id", id)
    if id >= 0:
      setattr(trainer, f"{role}_piece", proto.pieces[id].piece)
  if trainer.unk_id < 0:
    raise ValueError(
      "The GGUF file must name an unknown token (tokenizer.ggml.unknown_token_id), got none; use another file."
    )
  proto.pieces[trainer.unk_id].type = _UNKNOWN  # SentencePiece insists on exactly one
  normalizer = proto.normalizer_spec
  normalizer.name = "identity"
  normalizer.add_dummy_prefix = get("ggml.add_space_prefix", True)
  normalizer.remove_extra_whitespaces = False
  normalizer.escape_whitespaces = True
  return proto.SerializeToString()
