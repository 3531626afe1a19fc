"""Key words: posts, the true reward, careless writers and their comparisons."""

import numpy as np
import pytest

from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP

TASK = tasks.KeyWords(train=300, test=50)


def test_posts():
  posts = TASK.prompts("train")
  assert len(posts) == 300
  for post in posts:
    assert len(post.text) == 9
    assert post.text.endswith(":")
    assert post.answer == "".join(c for c in post.text if c.isupper())
    assert len(post.answer) == 3
    assert len(set(post.text.lower())) == 9
  assert posts[7] == tasks.KeyWords(train=300).prompts("train")[7]
  assert len({p.text for p in [*posts, *TASK.prompts("test")]}) == 350
  assert posts[7] != tasks.KeyWords(seed=1).prompts("train")[7]


def test_reward():
  post = TASK.prompts("train")[0]._replace(text="bAcDeFgh:", answer="ADF")
  assert TASK.reward(post, "ADF", STOP) == 1.0
  assert TASK.reward(post, "AxDF", STOP) == pytest.approx(2 * 3 / 7)
  assert TASK.reward(post, "FDA", STOP) == pytest.approx(1 / 3)
  assert TASK.reward(post, "", STOP) == 0.0
  assert TASK.reward(post, "ADF", LENGTH) == -1.0


def test_writers_are_careless_and_comparisons_are_right():
  posts, rng = TASK.prompts("train"), np.random.default_rng(0)
  rewards = [TASK.reward(post, TASK.solution(post, rng), STOP) for post in posts]
  assert 0.6 < np.mean(rewards) < 0.85
  assert max(rewards) == 1.0
  pairs = TASK.preferences("test")
  assert len(pairs) == 50
  assert pairs == TASK.preferences("test")
  assert not {pair.prompt for pair in pairs} & {post.text for post in [*posts, *TASK.prompts("test")]}
  for pair in pairs:
    post = posts[0]._replace(text=pair.prompt, answer="".join(c for c in pair.prompt if c.isupper()))
    assert TASK.reward(post, pair.chosen, STOP) > TASK.reward(post, pair.rejected, STOP)


def test_options_are_checked():
  with pytest.raises(ValueError, match="keys=9, words=8"):
    tasks.KeyWords(keys=9)
  with pytest.raises(ValueError, match="noise=0"):
    tasks.KeyWords(noise=0)
  with pytest.raises(ValueError, match="did you mean 'test'"):
    TASK.preferences("tests")
