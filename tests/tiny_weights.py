"""Random weights in the format of pretrained ones, for the configs that start from those."""

import pathlib
import string

import jax

from async_rl import models

GSM8K = pathlib.Path(__file__).parent / "data" / "gsm8k"


def tiny_weights(folder, vocab_size=80, tokenizer=None):
  """A Hugging Face folder of random weights with a SentencePiece tokenizer, by default of characters."""
  if not (folder / "weights").exists():
    config = models.ModelConfig(
      vocab_size=vocab_size, d_model=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=32
    )
    params = models.Policy(config, dtype="float32").init(jax.random.key(0))
    models.save_hf(folder / "weights", config, params, dtype="float32")
    tokenizer = tokenizer or models.train_sentencepiece([string.ascii_letters + ":; \n"])
    (folder / "weights" / "tokenizer.model").write_bytes(tokenizer)
  return folder / "weights"


def chatting_weights(folder):
  """Tiny weights that read a conversation as its texts, each with a stop token after it."""
  texts = (GSM8K / "train.jsonl").read_text().splitlines()
  weights = tiny_weights(folder, 384, models.train_sentencepiece(texts, "bpe", 380))
  (weights / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}<eos>{% endfor %}")
  return weights
