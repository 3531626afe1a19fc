"""A task whose reward and whose tool do what the prompt's answer says, in a module that workers can import."""

import dataclasses
import os
import sys
import time

from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Misbehaving:
  name: str = "misbehaving"
  broken: bool = False

  def warm_up(self):
    if self.broken:
      raise ImportError("no module named 'verifier'")

  def prompts(self, split):
    return [Prompt(i, split, "right") for i in range(4)]

  def reward(self, prompt, text, finish):
    match prompt.answer:
      case "right":
        return float(text == "yes")
      case "pid":
        return os.getpid()
      case "modules":
        return float(bool({"jax", "tensorflow", "tensorflow_datasets"} & set(sys.modules)))
      case "raise":
        raise ZeroDivisionError("by zero")
      case "nan":
        return float("nan")
      case "huge":  # finite, but not in float32
        return 1e39
      case "huge integer":
        return 10**400
      case "text":
        return "full marks"
      case "none":
        return None
      case "hang":
        while True:
          pass
      case "sleep":
        time.sleep(1000)
      case "exit":
        os._exit(3)
      case "sys.exit":
        sys.exit(0)
      case "recurse":
        return self.reward(prompt, text, finish)
      case "memory":
        return float(len(bytearray(1 << 40)))
      case "power":  # holds the interpreter lock inside one C call
        return float(len(str(9 ** (9**9))))
      case "orphan":  # a child of the worker must not outlive it
        os.spawnlp(os.P_WAIT, "sleep", "sleep", "98765.4321")

  def respond(self, prompt, turns):
    match prompt.answer:
      case "echo":
        return " ".join(turns)
      case "last":
        return None
      case "long":
        return "x" * (1 << 17)
      case "number":
        return 5
      case "surrogate":
        return "\ud800"
    return self.reward(prompt, turns[-1], "stop")
