"""PPO with a value head from the command line."""

import pytest

from async_rl import learning
from experiments import configs


@pytest.mark.parametrize(
  ("name", "chosen"),
  [("quickstart", dict(objective="ppo_clip", advantages="gae")), ("keywords", dict(method="ppo"))],
)
def test_options_reach_the_objective(name, chosen, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config, given = (
    configs.load(name),
    dict(discount=0.9, trace_decay=0.8, value_coefficient=0.7, value_rate=5.0, whiten=False),
  )
  objective = config.experiment(config.options(**chosen, **given)).objective
  assert objective.gae == learning.GAE(**given)
  assert objective.loss.func.__name__ == "ppo_clip" if name == "keywords" else objective.loss.__name__ == "ppo_clip"
