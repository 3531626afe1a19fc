"""The configurations that the tables of the pages compare: methods, lags and learning rates."""

from __future__ import annotations

#: A method, its lag, and its learning rate.
Config = tuple[str, int, float]

#: What might be advised in place of TOPR at a lag, at the rates of the studies.
RIVALS = (
  ("VESPO", 4, 2e-4),
  ("DPPO", 4, 1e-4),
  ("sequence PPO + OPOB, exact + ahead, momentum .97", 10, 2e-4),
  ("sequence PPO + OPOB, exact, momentum .97", 10, 2e-4),
  ("sequence PPO, momentum .97", 10, 2e-4),
  ("VESPO", 10, 2e-4),
  ("DPPO", 10, 1e-4),
  ("sequence PPO + OPOB, exact", 32, 1e-4),
  ("VESPO", 32, 2e-4),
  ("DPPO", 32, 1e-4),
  ("SAPO", 32, 2e-5),
  ("VESPO", 128, 2e-4),
  ("DPPO", 128, 1e-4),
  ("SAPO", 128, 2e-5),
)
#: The same of the study of every lag.
RIVALS_AT_EVERY_LAG = (
  ("TRM, bounds x 100", 4, 2e-4),
  ("ESTR, tau 4", 4, 2e-4),
  ("PPO", 4, 1e-4),
  ("M2PO, signed", 4, 1e-4),
  ("TRM, bounds x 10", 10, 2e-4),
  ("ESTR, tau 4", 10, 1e-4),
  ("PPO", 10, 1e-4),
  ("M2PO, signed", 10, 5e-5),
  ("TRM, bounds x 10", 32, 2e-4),
  ("ESTR, tau 1", 32, 5e-5),
  ("PPO", 32, 1e-4),
  ("M2PO, signed", 32, 5e-5),
  ("TRM, bounds x 10", 128, 2e-4),
  ("ESTR, tau 4", 128, 1e-4),
  ("PPO", 128, 1e-4),
  ("M2PO, signed", 128, 5e-5),
)
#: The same of the studies of short lags and of learning rates that fall.
RIVALS_AT_LAG_4 = (
  ("TOPR, momentum .5", 4, 2e-4),
  ("TOPR + GAC .05/.8", 4, 2e-4),
  ("TOPR + GAC .05/.8, at random", 4, 2e-4),
  ("PPO, MaxRL", 4, 2e-4),
)
RIVALS_THAT_FALL = (
  ("TOPR, momentum .5, falling rate", 10, 8e-4),
  ("sequence PPO + OPOB, exact, momentum .97, falling rate", 10, 4e-4),
  ("sequence PPO, momentum .97, falling rate", 10, 4e-4),
  ("TOPR, momentum .5, falling rate", 32, 8e-4),
)
RIVALS_ELSEWHERE = tuple(("TOPR, momentum .5, falling rate", lag, 8e-4) for lag in (4, 10, 32, 128))
RIVALS_OTHERS = (
  ("PPO", 128, 1e-4),
  ("PPO, MaxRL", 128, 1e-4),
  ("SAT", 128, 1e-4),
  ("centered token TIS", 128, 5e-5),
)
#: All of them, those that stand in two tables once.
ALL_RIVALS = tuple(
  dict.fromkeys((*RIVALS, *RIVALS_AT_EVERY_LAG, *RIVALS_AT_LAG_4, *RIVALS_THAT_FALL, *RIVALS_ELSEWHERE, *RIVALS_OTHERS))
)

#: The methods published later or of the same kind, of which a table says at which lags they were run.
COVERED = (
  "TOPR", "PPO", "VESPO", "DPPO", "DPPO + log-squared", "SAPO", "SAT", "PPO, MaxRL", "M2PO", "M2PO, signed",
  "ESTR, tau .25", "ESTR, tau 1", "ESTR, tau 4", "TRM", "TRM, bounds x 10", "TRM, bounds x 100", "centered",
  "centered token TIS", "sequence PPO, rate / lag", "TOPR + OPOB, exact", "OPOB, exact",
)  # fmt: skip

#: What an ingredient adds to a method, where several studies have both: with it, without it, lag, and rate of both.
INGREDIENTS = (
  ("sequence PPO + OPOB, exact + ahead, momentum .97", "sequence PPO + OPOB, exact, momentum .97", 10, 2e-4),
  ("sequence PPO + OPOB, exact, momentum .97", "sequence PPO + OPOB, exact", 10, 2e-4),
  ("sequence PPO, momentum .97", "sequence PPO", 10, 2e-4),
  ("TOPR, momentum .5", "TOPR", 10, 2e-4),
  ("TOPR, momentum .5", "TOPR", 32, 2e-4),
  ("sequence PPO + OPOB, exact", "sequence PPO", 10, 2e-4),
  ("sequence PPO + OPOB, exact", "sequence PPO", 32, 1e-4),
)

#: Lag, a method whose rate falls with its rate, and one whose does not.
FALLING = (
  (10, ("TOPR, momentum .5, falling rate", 8e-4), ("TOPR", 2e-4)),
  (10, ("sequence PPO, momentum .97, falling rate", 4e-4), ("sequence PPO, momentum .97", 2e-4)),
  (32, ("TOPR, momentum .5, falling rate", 8e-4), ("TOPR, momentum .5", 2e-4)),
)

#: The same of the study of other lags.
FALLING_ELSEWHERE = tuple(
  (lag, ("TOPR, momentum .5, falling rate", 8e-4), ("TOPR, momentum .5", 2e-4)) for lag in (4, 10, 32, 128)
)
FALLING_SORTING = ((10, ("TOPR, momentum .5, falling rate", 4e-4), ("TOPR", 1e-4)),)
FALLING_WIDE = ((10, ("TOPR, falling rate", 8e-4), ("TOPR", 2e-4)),)

#: What else is told apart on the same seeds: a configuration, and another one.
PAIRS_AT_LAG_4 = (
  (("TOPR, momentum .5", 4, 2e-4), ("TRM, bounds x 100", 4, 2e-4)),
  (("TOPR, momentum .5", 4, 2e-4), ("TOPR + GAC .05/.8", 4, 2e-4)),
)
_AHEAD = ("sequence PPO + OPOB, exact + ahead, momentum .97", 10, 2e-4)
PAIRS_THAT_FALL = (
  (("TOPR, momentum .5, falling rate", 10, 8e-4), _AHEAD),
  (("sequence PPO + OPOB, exact, momentum .97, falling rate", 10, 4e-4), _AHEAD),
)
PAIRS_ALIKE = tuple(
  (("TOPR, momentum .5, falling rate", lag, 8e-4), ("sync, falling rate", 0, 6e-4)) for lag in (4, 10, 32, 128)
)
PAIRS_OTHERS = tuple(
  ((f"{method}, falling rate", lag, rate), ("TOPR, momentum .5, falling rate", lag, 8e-4))
  for method, lag, rate in (
    ("VESPO", 4, 8e-4), ("TRM, bounds x 100", 4, 8e-4), ("DPPO", 4, 4e-4), ("VESPO", 10, 8e-4), ("DPPO", 10, 4e-4),
    ("VESPO", 32, 4e-4), ("DPPO", 32, 2e-4),
  )
)  # fmt: skip
PAIRS = (*PAIRS_AT_LAG_4, *PAIRS_THAT_FALL, *PAIRS_ALIKE, *PAIRS_OTHERS)

#: Pairs of configurations whose accuracies are compared along the training.
ALONG = (
  (("TOPR, momentum .5, falling rate", 10, 8e-4), ("TOPR", 10, 2e-4)),
  (("TOPR, momentum .5, falling rate", 32, 8e-4), ("TOPR", 32, 2e-4)),
  (("TOPR, momentum .5, falling rate", 10, 8e-4), ("sync", 0, 2e-4)),
  (("sync, falling rate", 0, 4e-4), ("sync", 0, 2e-4)),
)

#: The same of the study of other lags.
ALONG_ELSEWHERE = tuple(
  (("TOPR, momentum .5, falling rate", lag, 8e-4), (other, k, 2e-4))
  for lag in (4, 128)
  for other, k in (("TOPR", lag), ("sync", 0))
)

#: The answer in short: lag, what to use, and the configuration that was measured.
ANSWERS = (
  (0, "plain policy gradient, Adam as usual (sync)", ("sync", 0, 2e-4)),
  (0, "the same with exact OPOB", ("sync, OPOB exact", 0, 2e-4)),
  (0, "sync with twice the rate, which falls to 0", ("sync, falling rate", 0, 4e-4)),
  (4, "TOPR, Adam as usual", ("TOPR", 4, 2e-4)),
  (4, "TOPR, Adam with b1 = .5", ("TOPR, momentum .5", 4, 2e-4)),
  (4, "TOPR, b1 = .5, four times the rate, which falls to 0", ("TOPR, momentum .5, falling rate", 4, 8e-4)),
  (4, "TRM with 100 times its published bounds, Adam as usual", ("TRM, bounds x 100", 4, 2e-4)),
  (10, "TOPR, Adam as usual", ("TOPR", 10, 2e-4)),
  (10, "TOPR, b1 = .5, four times the rate, which falls to 0", ("TOPR, momentum .5, falling rate", 10, 8e-4)),
  (10, "PPO on sequence ratios, Adam with b1 = .97", ("sequence PPO, momentum .97", 10, 2e-4)),
  (10, "the same with exact OPOB", ("sequence PPO + OPOB, exact, momentum .97", 10, 2e-4)),
  (10, "the same with exact OPOB and the lead", ("sequence PPO + OPOB, exact + ahead, momentum .97", 10, 2e-4)),
  (32, "TOPR, Adam as usual", ("TOPR", 32, 2e-4)),
  (32, "TOPR, Adam with b1 = .5", ("TOPR, momentum .5", 32, 2e-4)),
  (32, "TOPR, b1 = .5, four times the rate, which falls to 0", ("TOPR, momentum .5, falling rate", 32, 8e-4)),
  (128, "TOPR, Adam as usual", ("TOPR", 128, 2e-4)),
  (128, "TOPR, b1 = .5, four times the rate, which falls to 0", ("TOPR, momentum .5, falling rate", 128, 8e-4)),
)

#: What the figure of the answers shows by lag: a label, and the configurations.
SHOWN_BY_LAG: dict[str, tuple[Config, ...]] = {
  "sync, rate falls": (("sync, falling rate", 0, 6e-4),),
  "TOPR, b1 = .5, rate falls": tuple(("TOPR, momentum .5, falling rate", lag, 8e-4) for lag in (4, 10, 32, 128)),
  "TOPR, b1 = .5": tuple(("TOPR, momentum .5", lag, 2e-4) for lag in (4, 10, 32, 128)),
  "TOPR": tuple(("TOPR", lag, 2e-4) for lag in (4, 10, 32, 128)),
  "VESPO": tuple(("VESPO", lag, 2e-4) for lag in (4, 10, 32, 128)),
  "DPPO": tuple(("DPPO", lag, 1e-4) for lag in (4, 10, 32, 128)),
  "VCPO, exact": tuple(("VCPO, exact", lag, 1e-4) for lag in (10, 32)),
  "A-3PO": (("A-3PO", 10, 5e-5),),
  "PPO's clip": (("PPO", 4, 1e-4), ("PPO", 10, 1e-4), ("PPO", 32, 5e-5), ("PPO", 128, 1e-4)),
  "no correction": (("no correction", 10, 1e-5),),
}

#: The methods of the second task and size, and the rates of those that the studies of ch4 have at a lag.
TRANSFERRED = (
  "TOPR, momentum .5, falling rate", "TOPR, falling rate", "TOPR", "sequence PPO + OPOB, exact, momentum .97",
  "sequence PPO, momentum .97", "PPO", "seq TIS", "no correction",
)  # fmt: skip
RATES_OF_SUMS = {
  ("TOPR, momentum .5, falling rate", 10): 8e-4,
  ("TOPR", 10): 2e-4,
  ("sequence PPO + OPOB, exact, momentum .97", 10): 2e-4,
  ("sequence PPO, momentum .97", 10): 2e-4,
  ("PPO", 10): 1e-4,
  ("seq TIS", 10): 1e-4,
  ("no correction", 10): 1e-5,
  ("TOPR", 32): 2e-4,
  ("sequence PPO, momentum .97", 32): 1e-4,
  ("PPO", 32): 5e-5,
}
