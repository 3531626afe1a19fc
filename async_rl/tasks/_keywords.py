"""Key words of made-up posts: a summarization task that a tiny model learns in a minute, with a true reward."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

import numpy as np

from async_rl.tasks._summaries import rouge_l
from async_rl.tasks._task import Preference
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.types import STOP
from async_rl.types import Prompt

_SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class KeyWords:
  """Posts whose words are single letters, to be summarized by the capital ones in their order.

  The post `kCbHsWpe:` is summarized by `CHW`. The reward is ROUGE-L with the right summary, as in `Summaries`, and
  `missing_end` without an end. The demonstrations come from careless writers: each omits a word, or adds another letter
  after it, with a probability of its own. Imitation is therefore mediocre, and there is something to learn from the
  comparisons of `preferences`: two such summaries of a post, the better one as `chosen`.

  Attributes:
    letters: the number of letters in the alphabet.
    words: the number of words in a post, all different.
    keys: the number of capitalized words.
    noise: the probability of each kind of mistake, averaged over writers; a writer's own is between 0 and twice that.
    train: the number of posts, and of comparisons, in the training split.
    test: the number of posts, and of comparisons, in the test split.
    missing_end: the reward of a completion that did not end.
    seed: the seed of posts and comparisons.
  """

  letters: int = 16
  words: int = 8
  keys: int = 3
  noise: float = 0.25
  train: int = 8192
  test: int = 512
  missing_end: float = -1.0
  seed: int = 0

  #: Every character that prompts and solutions use, and how `models.train_sentencepiece` cuts them.
  corpus = string.ascii_letters + ":"
  model_type = "char"

  def __post_init__(self):
    if not 1 <= self.keys <= self.words <= self.letters <= 26:
      raise ValueError(
        f"1 <= keys <= words <= letters <= 26 must hold, got keys={self.keys}, words={self.words}, "
        f"letters={self.letters}"
      )
    if not 0 < self.noise <= 0.5:
      raise ValueError(f"noise must lie in (0, 0.5], got noise={self.noise}")

  @property
  def name(self) -> str:
    return "keywords"

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, _SPLITS)
    return Prompts(range(self._size(split)), lambda id, _: self._post(id, np.random.default_rng(self._key(split, id))))

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    return rouge_l(" ".join(text), " ".join(prompt.answer)) if finish == STOP else self.missing_end

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Writes a summary as one of the writers does."""
    letters, carelessness = "", 2 * self.noise * rng.random()
    others = self._alphabet + self._alphabet.upper()
    for word in prompt.answer:
      letters += word * (rng.random() >= carelessness)
      letters += others[rng.integers(len(others))] * (rng.random() < carelessness)
    return letters

  def preferences(self, split: str) -> Sequence[Preference]:
    """Returns one comparison for each of as many other posts; never of two equally good summaries."""
    known("split", split, _SPLITS)
    return [self._preference(np.random.default_rng([*self._key(split, i), 1])) for i in range(self._size(split))]

  def _preference(self, rng: np.random.Generator) -> Preference:
    post = self._post(0, rng)
    while True:
      summaries = [self.solution(post, rng) for _ in range(2)]
      first, second = (self.reward(post, text, STOP) for text in summaries)
      if first != second:
        chosen, rejected = summaries if first > second else summaries[::-1]
        return Preference(post.text, chosen, rejected)

  def _post(self, id: int, rng: np.random.Generator) -> Prompt:
    letters = [self._alphabet[i] for i in rng.choice(self.letters, self.words, replace=False).tolist()]
    for i in rng.choice(self.words, self.keys, replace=False).tolist():
      letters[i] = letters[i].upper()
    return Prompt(id, f"{''.join(letters)}:", "".join(filter(str.isupper, letters)))

  @property
  def _alphabet(self) -> str:
    return string.ascii_lowercase[: self.letters]

  def _size(self, split: str) -> int:
    return {"train": self.train, "test": self.test}[split]

  def _key(self, split: str, id: int) -> list[int]:
    return [self.seed, _SPLITS.index(split), id]
