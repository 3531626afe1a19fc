"""Loading the tokenizer of a file or folder, whichever kind it is."""

from __future__ import annotations

import datetime
import os
import pathlib
from typing import Any

import tokenizers

from async_rl._validation import check_number
from async_rl.models._chat_template import TEMPLATE_DATE
from async_rl.models._files import explained
from async_rl.models._files import read_json_object
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

  with explained(path):
    reader = gguf.GGUFReader(path)
  return tokenizer_from_gguf(reader, date)


def _from_folder(folder: pathlib.Path, date: datetime.date) -> HFTokenizer | SentencePieceTokenizer:
  config = _read_optional(folder / "tokenizer_config.json")
  template = _read_template(folder, config)
  file = folder / "tokenizer.json"
  if file.exists():
    with explained(file):
      tokenizer = tokenizers.Tokenizer.from_file(str(file))
    return HFTokenizer(
      tokenizer,
      bos_id=_find_token(tokenizer, config, "bos_token", folder) if config.get("add_bos_token") else None,
      eos_ids=_find_ends(tokenizer, config, folder),
      pad_id=_find_token(tokenizer, config, "pad_token"),
      chat_template=template,
      date=date,
    )
  if (folder / "tokenizer.model").exists():
    return SentencePieceTokenizer(
      folder / "tokenizer.model", add_bos=config.get("add_bos_token", True), chat_template=template, date=date
    )
  raise FileNotFoundError(f"{str(folder)!r} holds neither tokenizer.json nor tokenizer.model; copy one of them there.")


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
  return read_json_object(path) if path.exists() else {}


def _read_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
  """Returns the chat template of a folder: the file of its own, the configuration's, or its default among several."""
  file = folder / "chat_template.jinja"
  if file.exists():
    with explained(file):
      return file.read_text(encoding="utf-8")
  template = config.get("chat_template")
  if isinstance(template, list):  # several named ones
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if "default" not in named:
      raise ValueError(
        f"{folder / 'tokenizer_config.json'} has chat templates {list(named)}, but none named 'default'."
      )
    template = named["default"]
  if not isinstance(template, str | None):
    raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, got {template!r}.")
  return template


def _find_ends(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], folder: pathlib.Path) -> list[int]:
  """Returns the ids of the end tokens that the tokenizer's and the generation's configurations name."""
  found = _read_optional(folder / "generation_config.json").get("eos_token_id")
  ids = found if isinstance(found, list) else [] if found is None else [found]
  remedy = f"see {folder / 'generation_config.json'}"
  for id in ids:
    check_number("eos_token_id", id, whole=True, at_least=0, below=tokenizer.get_vocab_size(), remedy=remedy)
  eos = _find_token(tokenizer, config, "eos_token", folder)
  return ids if eos is None else [eos, *ids]


def _find_token(
  tokenizer: tokenizers.Tokenizer, config: dict[str, Any], name: str, folder: pathlib.Path | None = None
) -> int | None:
  """Returns the id of a token that a configuration names, as text or as an object with its content.

  Raises:
    ValueError: if it is not of the vocabulary; without `folder` the result is None.
  """
  token = config.get(name)
  if isinstance(token, dict):
    token = token.get("content")
  if token is None:
    return None
  id = tokenizer.token_to_id(token) if isinstance(token, str) else None
  if id is None and folder is not None:
    raise ValueError(
      f"{folder / 'tokenizer_config.json'} has {name}={token!r}, which is no token of tokenizer.json; use the files of "
      "one tokenizer."
    )
  return id
