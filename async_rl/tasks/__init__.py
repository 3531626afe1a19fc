"""Tasks: prompts, verifiable rewards, tools, preferences. Importing this loads neither JAX nor a data-set library."""

from async_rl.tasks._calculator import Calculator
from async_rl.tasks._countdown import Countdown
from async_rl.tasks._countdown import CountdownSteps
from async_rl.tasks._gsm8k import GSM8K
from async_rl.tasks._keywords import KeyWords
from async_rl.tasks._maths import Maths
from async_rl.tasks._numbers import final_answer
from async_rl.tasks._reasoning_gym import ReasoningGym
from async_rl.tasks._registry import TASKS
from async_rl.tasks._registry import make
from async_rl.tasks._rewards import RewardPool
from async_rl.tasks._rewards import RewardResult
from async_rl.tasks._rewards import Scorer
from async_rl.tasks._rewards import ToolResult
from async_rl.tasks._statistics import Difficulty
from async_rl.tasks._statistics import quantiles
from async_rl.tasks._statistics import usable
from async_rl.tasks._summaries import Summaries
from async_rl.tasks._summaries import rouge_l
from async_rl.tasks._sums import Sums
from async_rl.tasks._task import Preference
from async_rl.tasks._task import PreferenceTask
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import SupervisedTask
from async_rl.tasks._task import Task
from async_rl.tasks._task import ToolTask
