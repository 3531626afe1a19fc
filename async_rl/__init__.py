"""Asynchronous reinforcement-learning post-training of language models in JAX, stable at any lag."""

__version__ = "0.1.0"
