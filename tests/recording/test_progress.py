"""A bar on a terminal, plain lines elsewhere."""

import io

from async_rl.recording._progress import Progress

METRICS = {
  "reward/mean": 0.51234,
  "staleness/mean": 2.04,
  "ess/sequence": 0.714,
  "throughput/generated": 12345.6,
  "other": 1.0,
}


class Terminal(io.StringIO):
  """A text stream that says it is a terminal."""

  def isatty(self):
    return True


def test_plain_lines():
  output = io.StringIO()
  progress = Progress(3, output=output, every=0.0)
  progress.update(1, METRICS)
  progress.note("saved")
  progress.update(2, {"reward/mean": 1})
  progress.close()
  assert output.getvalue().splitlines() == [
    "step 1/3: reward 0.512, lag 2.0, ESS 0.71, tokens/s 12,346",
    "saved",
    "step 2/3: reward 1.000",
  ]


def test_plain_lines_come_now_and_then_and_at_the_end():
  output = io.StringIO()
  progress = Progress(50, output=output, every=3600.0)
  for done in range(1, 51):
    progress.update(done, {})
  assert [line.split(":")[0] for line in output.getvalue().splitlines()] == ["step 1/50", "step 50/50"]


def test_a_warning_is_written_once():
  output = io.StringIO()
  progress = Progress(3, output=output)
  for text in ("low", "high", "low"):
    progress.warn(text)
  assert output.getvalue().splitlines() == ["low", "high"]


def test_the_last_line_has_the_mean_rate_of_the_run():
  output = io.StringIO()
  progress = Progress(3, output=output, every=0.0)
  for done, (rate, seconds) in enumerate([(100.0, 3.0), (400.0, 1.0), (0.0, 1.0)], start=1):
    progress.update(done, {"throughput/generated": rate, "time/step": seconds})
  assert [line.split(": ")[1] for line in output.getvalue().splitlines()] == [
    "tokens/s 100",
    "tokens/s 400",
    "tokens/s 140",
  ]


def test_bar_on_a_terminal():
  output = Terminal()
  progress = Progress(4, start=1, output=output)
  progress.update(3, METRICS)
  progress.note("held-out accuracy 0.5")
  progress.update(4, METRICS)
  progress.close()
  text = output.getvalue()
  assert "held-out accuracy 0.5\n" in text
  last = text.split("\r")[-1]
  assert "4/4" in last
  assert "reward 0.512, lag 2.0, ESS 0.71, tokens/s 12,346" in last
