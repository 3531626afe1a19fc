"""Loading the tokenizer of a file or folder, whichever kind it is."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from typing import Any

import tokenizers

from async_rl.models._chat_template import TEMPLATE_DATE
from async_rl.models._gguf_tokenizer import tokenizer_from_gguf
from async_rl.models._tokenizers import HFTokenizer
from async_rl.models._tokenizers import SentencePieceTokenizer


def load_tokenizer(
  path: str | os.PathLike, *, date: datetime.date = TEMPLATE_DATE
) -> HFTokenizer | SentencePieceTokenizer:
  """Loads the tokenizer at `path`: a `.gguf` or `.model` file, or a Hugging Face folder.

  Args:
    path: the file or folder; `~` is expanded.
    date: the date that the chat template may write into prompts, see `ChatTemplate`.

  Raises:
    FileNotFoundError: if there is nothing, or the folder holds neither tokenizer.json nor tokenizer.model.
    ValueError: if the file is of another kind.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    return _from_folder(path, date)
  if path.suffix not in (".model", ".gguf"):
    raise ValueError(f"path must be a .gguf or .model file or a folder, got path={str(path)!r}.")
  if not path.exists():
    raise FileNotFoundError(f"There is no tokenizer at {str(path)!r}; check the path.")
  if path.suffix == ".model":
    return SentencePieceTokenizer(path, date=date)
  import gguf

  return tokenizer_from_gguf(gguf.GGUFReader(path), date)


def _from_folder(folder: pathlib.Path, date: datetime.date) -> HFTokenizer | SentencePieceTokenizer:
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
      date=date,
    )
  if (folder / "tokenizer.model").exists():
    return SentencePieceTokenizer(
      folder / "tokenizer.model", add_bos=config.get("add_bos_token", True), chat_template=template, date=date
    )
  raise FileNotFoundError(f"{str(folder)!r} holds neither tokenizer.json nor tokenizer.model; copy one of them there.")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.exists() else {}


def _id(tokenizer: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> int | None:
  """Returns the id of a token that a configuration names, as text or as an object with its content."""
  if token is None:
    return None
  return tokenizer.token_to_id(token if isinstance(token, str) else token["content"])
