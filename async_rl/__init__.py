"""Asynchronous reinforcement-learning post-training of language models in JAX, made to stay stable on stale data."""

__version__ = "0.1.0"
