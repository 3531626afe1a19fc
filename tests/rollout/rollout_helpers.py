"""Groups for the tests of the buffer, and shortcuts to submit them."""

import numpy as np

from async_rl.types import FAILED
from async_rl.types import LENGTH
from async_rl.types import NO_VERSION
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

PROMPTS = [Prompt(i, f"prompt {i}", {"answer": i}) for i in range(200)]


def make_group(ticket, versions=(0, 0), samples=2):
  """A group whose samples carry the token versions `versions`, and end with an undrawn token."""
  length = len(versions) + 1
  completions = tuple(
    Completion(
      ticket=ticket,
      sample=k,
      tokens=np.arange(length, dtype=np.int32) + ticket,
      logprobs=np.linspace(-1, -0.1 * (k + 1), length, dtype=np.float32),
      versions=np.asarray([*versions, NO_VERSION], np.int32),
      mask=np.arange(length) < length - 1,
      finish=(STOP, LENGTH, FAILED)[(ticket + k) % 3],
    )
    for k in range(samples)
  )
  request = Request(ticket, np.arange(ticket % 5 + 1, dtype=np.int32), PROMPTS[ticket % len(PROMPTS)])
  return Group(request, completions, np.arange(samples, dtype=np.float32) + ticket, failed=(0,) if ticket % 2 else ())


def tickets(groups):
  return [g.request.ticket for g in groups]


def submit_all(buffer, version):
  return list(iter(lambda: buffer.try_submit(version), None))


def submit_all_put(buffer, version):
  for ticket in submit_all(buffer, version):
    buffer.add_group(make_group(ticket, (version,)))
