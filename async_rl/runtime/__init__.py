"""A run: its experiment, the loop and what may come before it, supervised and reward-model training."""

from async_rl.runtime._evaluation import complete as complete
from async_rl.runtime._evaluation import evaluate as evaluate
from async_rl.runtime._evaluation import mean_and_interval as mean_and_interval
from async_rl.runtime._experiment import Experiment as Experiment
from async_rl.runtime._kept import restore_or_make as restore_or_make
from async_rl.runtime._parts import Parts as Parts
from async_rl.runtime._reward_model import abstract_reward_model as abstract_reward_model
from async_rl.runtime._reward_model import make_scorer as make_scorer
from async_rl.runtime._reward_model import pair_accuracy as pair_accuracy
from async_rl.runtime._reward_model import train_reward_model as train_reward_model
from async_rl.runtime._run import Summary as Summary
from async_rl.runtime._run import train as train
from async_rl.runtime._session import Session as Session
from async_rl.runtime._signals import Interrupted as Interrupted
from async_rl.runtime._supervised import train_supervised as train_supervised
