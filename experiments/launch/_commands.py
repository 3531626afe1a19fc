"""Commands of the cloud: they run, or they fail with a sentence that says why."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

Command = tuple[str, ...]

#: Kinds of failure by what the commands write; the first one that matches counts.
_KINDS = {
  "quota": r"quota.{0,200}exceed|exceed.{0,200}quota|insufficient.{0,200}quota",
  "capacity": r"no more capacity|POOL_EXHAUSTED|does not have enough resources|stockout|insufficient capacity",
  "missing": r"NOT_FOUND|was not found|not found",
  "exists": r"ALREADY_EXISTS|already exists",
}
_INSTALL = {
  "gcloud": "install the Google Cloud CLI",
  "kubectl": "run `gcloud components install kubectl`",
  "xpk": "run `pip install xpk`",
  "docker": "install Docker, or build the image elsewhere",
}


class CommandError(RuntimeError):
  """A command failed; the message is one sentence for the user.

  Args:
    command: the command.
    output: what it wrote.

  Attributes:
    kind: the reason: "quota", "capacity", "missing" (what it works on), "exists" (what it creates), "slow" or "other".
  """

  def __init__(self, command: Sequence[str], output: str, kind: str | None = None):
    matches = (name for name, pattern in _KINDS.items() if re.search(pattern, output, re.IGNORECASE))
    self.kind = kind or next(matches, "other")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR")), len(lines) - 1)
    sentence = " ".join(lines[max(first, 0) :])[:600] or "without a word"
    super().__init__(f"`{' '.join(command[:5])} ...` failed: {sentence}")


def run(command: Sequence[str], text: str | None = None, timeout: float | None = None) -> str:
  """Runs a command and returns what it writes to its standard output.

  Args:
    command: the command.
    text: its standard input.
    timeout: the seconds that it may take; `None` for any time.

  Raises:
    CommandError: if it fails, takes longer, or does not exist.
  """
  try:
    done = subprocess.run(
      command,
      input=text,
      stdin=subprocess.DEVNULL if text is None else None,
      capture_output=True,
      text=True,
      check=False,
      timeout=timeout,
    )
  except FileNotFoundError:
    remedy = _INSTALL.get(command[0], "install it")
    raise CommandError(command, f"{command[0]} is not on the PATH: {remedy}.", "other") from None
  except subprocess.TimeoutExpired:
    raise CommandError(command, f"no answer within {timeout:.0f} s", "slow") from None
  if done.returncode:
    raise CommandError(command, done.stderr or done.stdout)
  return done.stdout


def run_unless_missing(command: Sequence[str]) -> bool:
  """Runs a command; returns whether there was what it works on.

  Raises:
    CommandError: if it fails for another reason.
  """
  try:
    run(command)
  except CommandError as error:
    if error.kind != "missing":
      raise
    return False
  return True


def say(line: str) -> None:
  """Prints a line at once, also where the output is a file."""
  print(line, flush=True)
