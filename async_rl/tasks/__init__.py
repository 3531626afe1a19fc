"""Tasks: prompts and verifiable rewards. Importing this folder loads neither JAX nor a data-set library."""

from async_rl.tasks._registry import TASKS
from async_rl.tasks._registry import make
from async_rl.tasks._rewards import RewardPool
from async_rl.tasks._rewards import RewardResult
from async_rl.tasks._sums import Sums
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import SupervisedTask
from async_rl.tasks._task import Task
