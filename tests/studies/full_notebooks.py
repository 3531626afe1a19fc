"""Runs the notebooks at their full sizes, each in an empty folder where it installs the wheel: not part of the check.

    python tests/studies/full_notebooks.py [quickstart ...] [--folder runs/notebooks]

Prints the seconds that each took, and leaves the notebooks with their outputs, and their pictures, in the folder.
Two CPU cores: under five minutes each. gsm8k needs the weights of SmolLM2-135M, which `tests/run.sh` fetches, and GSM8K
itself from TFDS, or from a folder (--gsm8k-folder); without a network, give both.
"""

import argparse
import base64
import pathlib
import sys
import tempfile
import time

import nbformat

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from installing import build_wheel
from installing import copy_sources
from notebooks import NOTEBOOKS
from notebooks import make_kernel_environment
from notebooks import pack
from notebooks import pictures
from notebooks import run_notebook


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("names", nargs="*", help="notebooks; default: all")
  parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/notebooks"))
  parser.add_argument("--gsm8k-folder", type=pathlib.Path)
  options = parser.parse_args()
  options.folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as scratch:
    sources, built = pathlib.Path(scratch, "sources"), pathlib.Path(scratch, "wheel")
    sources.mkdir()
    built.mkdir()
    copy_sources(sources)
    wheel = build_wheel(sources, built)
    archive, python = pack(sources, wheel, built), make_kernel_environment(pathlib.Path(scratch, "environment"), wheel)
    for path in NOTEBOOKS:
      if options.names and path.stem not in options.names:
        continue
      data = options.gsm8k_folder
      parameters = f"FOLDER = {str(data.absolute())!r}" if path.stem == "gsm8k" and data else ""
      began = time.monotonic()
      with tempfile.TemporaryDirectory() as empty:
        notebook = run_notebook(path, python, archive, empty, parameters, limit=1800)
      print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)
      nbformat.write(notebook, options.folder / path.name)
      for i, picture in enumerate(pictures(notebook)):
        (options.folder / f"{path.stem}_{i}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
  main()
