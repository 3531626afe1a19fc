"""Defines the methods of the sweep: sets of knobs by name, in groups."""

from __future__ import annotations

from typing import Any

from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_losses as sweep_losses


def _method(loss: str, *parts: dict[str, Any], **knobs: Any) -> dict[str, Any]:
  merged = {"loss": list(sweep_losses.LOSSES).index(loss)}
  for part in (*parts, knobs):
    merged |= part
  return merged


ESS = {"ess_power": 0.5}
GAC = {"align_low": 0.2, "align_high": 0.8}
OPOB = {"baseline": list(sweep_losses.BASELINES).index("opob")}

#: The baseline without lag, and with heavier momentum for the candidates that use it.
SYNC = {
  "sync": _method("reinforce"),
  "sync, momentum .97": _method("reinforce", b1=0.97),
  "sync, momentum .99": _method("reinforce", b1=0.99),
}

#: The proposals of papers, and their combinations.
PUBLISHED = {
  "no correction": _method("reinforce"),
  "token TIS": _method("token_tis"),
  "seq TIS": _method("sequence_tis"),
  "PPO": _method("ppo"),
  "decoupled PPO": _method("recompute"),
  "A-3PO": _method("a3po"),
  "GSPO": _method("gspo"),
  "CISPO": _method("cispo"),
  "TOPR": _method("topr"),
  "M2PO": _method("m2po"),
  "ESS": _method("sequence_tis", ESS),
  "OPOB": _method("sequence_tis", OPOB),
  "VCPO": _method("sequence_tis", ESS, OPOB),
  "GAC": _method("reinforce", GAC),
  "seq TIS + GAC": _method("sequence_tis", GAC),
  "VCPO + GAC": _method("sequence_tis", ESS, OPOB, GAC),
  "PPO + GAC": _method("ppo", GAC),
  "PPO + ESS": _method("ppo", ESS),
  "A-3PO + GAC + ESS": _method("a3po", ESS, GAC),
}

#: OPOB with exact norms: a program of its own, which makes one gradient per trajectory.
EXACT = {"OPOB, exact": PUBLISHED["OPOB"], "VCPO, exact": PUBLISHED["VCPO"]}

#: The reference of those that use exact norms.
SYNC_EXACT = {"sync, OPOB exact": _method("reinforce", OPOB)}

#: A third round, likewise: what exact norms add to the best of the second.
THIRD = {
  "OPOB, exact + ahead, momentum .97": _method("sequence_tis", OPOB, ahead=1.0, b1=0.97),
  "VCPO, exact + ahead, momentum .97": _method("sequence_tis", ESS, OPOB, ahead=1.0, b1=0.97),
  "VCPO, exact + ahead, momentum .99": _method("sequence_tis", ESS, OPOB, ahead=1.0, b1=0.99),
  "TOPR + OPOB, exact": _method("topr", OPOB),
  "sequence PPO + OPOB, exact": _method("sequence_ppo", OPOB),
  "sequence PPO + OPOB, exact + ahead, momentum .97": _method("sequence_ppo", OPOB, ahead=1.0, b1=0.97),
}

#: Tried in the hope of reaching sync, like `AHEAD`.
CANDIDATES = {
  "PPO + ESS + GAC": _method("ppo", ESS, GAC),
  "ESS, power 1": _method("sequence_tis", ess_power=1.0),
  "seq TIS cap 1 + ESS": _method("sequence_tis_1", ESS),
  "prefix TIS + ESS": _method("prefix_tis", ESS),
  "tempered IS + ESS": _method("tempered_is", ESS),
  "importance mean + ESS": _method("sequence_tis", ESS, baseline=list(sweep_losses.BASELINES).index("importance_mean")),
  "TOPR + ESS": _method("topr", ESS),
  "wide GSPO + ESS": _method("gspo_wide", ESS),
  "sequence PPO": _method("sequence_ppo"),
  "seq TIS + servo": _method("sequence_tis", servo=0.1),
  "PPO + servo": _method("ppo", servo=0.1),
  "seq TIS + anchor": _method("sequence_tis", anchor=0.1),
  "anchor + ESS": _method("sequence_tis", ESS, anchor=0.1),
  "PPO + token anchor": _method("ppo", token_anchor=0.3),
  "average .9 + ESS": _method("sequence_tis", ESS, average=0.9),
}

#: Drawing with the weights that momentum is about to reach, with its ablations.
AHEAD = {
  "no correction + ahead": _method("reinforce", ahead=1.0),
  "seq TIS + ahead": _method("sequence_tis", ahead=1.0),
  "PPO + ahead": _method("ppo", ahead=1.0),
  "ESS + ahead": _method("sequence_tis", ESS, ahead=1.0),
  "PPO + GAC + ahead": _method("ppo", GAC, ahead=1.0),
  "ESS, momentum .97": _method("sequence_tis", ESS, b1=0.97),
  "PPO, momentum .97": _method("ppo", b1=0.97),
  "seq TIS + ahead, momentum .97": _method("sequence_tis", ahead=1.0, b1=0.97),
  "ESS + ahead, momentum .97": _method("sequence_tis", ESS, ahead=1.0, b1=0.97),
  "PPO + ahead, momentum .97": _method("ppo", ahead=1.0, b1=0.97),
  "ESS + ahead, momentum .99": _method("sequence_tis", ESS, ahead=1.0, b1=0.99),
  "PPO + ahead, momentum .99": _method("ppo", ahead=1.0, b1=0.99),
}

#: A second round, from what the first one showed at high rates: TOPR, sequence-level clips, the lead of the momentum.
SECOND = {
  "TOPR + ahead": _method("topr", ahead=1.0),
  "TOPR, momentum .97": _method("topr", b1=0.97),
  "TOPR + ahead, momentum .97": _method("topr", ahead=1.0, b1=0.97),
  "TOPR + ahead, momentum .99": _method("topr", ahead=1.0, b1=0.99),
  "TOPR + ESS + ahead, momentum .97": _method("topr", ESS, ahead=1.0, b1=0.97),
  "TOPR + GAC": _method("topr", GAC),
  "wide GSPO + ahead, momentum .97": _method("gspo_wide", ahead=1.0, b1=0.97),
  "sequence PPO + ahead, momentum .97": _method("sequence_ppo", ahead=1.0, b1=0.97),
}

#: The same momentum without the lead, so that what the lead adds can be told from what momentum does.
MOMENTUM = {
  "seq TIS, momentum .97": _method("sequence_tis", b1=0.97),
  "sequence PPO, momentum .97": _method("sequence_ppo", b1=0.97),
}

#: Momentum and lead, each in and out, with exact norms.
MOMENTUM_EXACT = {
  "sequence PPO + OPOB, exact, momentum .97": _method("sequence_ppo", OPOB, b1=0.97),
  "sequence PPO + OPOB, exact + ahead": _method("sequence_ppo", OPOB, ahead=1.0),
}

#: Later proposals for the weight or the advantage of a token.
TOKEN_WEIGHTS = {
  "DPPO": _method("dppo"),
  "SAPO": _method("sapo"),
  "PPO, MaxRL": _method("ppo", baseline=list(sweep_losses.BASELINES).index("maxrl")),
  "VESPO": _method("vespo"),
  "SAT": _method("sat"),
  "DPPO + log-squared": _method("log_squared"),
  "M2PO, signed": _method("m2po_signed"),
}

#: Trust regions of a token, by the entropy of the distribution that drew it, and of a sequence.
ESTR = {
  "ESTR, tau .25": _method("estr_low"),
  "ESTR, tau 1": _method("estr"),
  "ESTR, tau 4": _method("estr_high"),
}
TRM = {
  "TRM": _method("trm"),
  "TRM, bounds x 10": _method("trm_10"),
  "TRM, bounds x 100": _method("trm_100"),
}

CENTERED = {"centering": list(sweep_losses.CENTERINGS).index("plain")}
CENTERED_TIS = {"centering": list(sweep_losses.CENTERINGS).index("token_tis")}

#: Score centering, with and without weights.
CENTERED_SCORES = {
  "centered": _method("reinforce", CENTERED),
  "centered token TIS": _method("token_tis", CENTERED_TIS),
}

#: Single ingredients of the best combination, and the rate of sync divided by the lag.
INGREDIENTS = {
  "no correction, momentum .97": _method("reinforce", b1=0.97),
  "sequence PPO, rate / lag": _method("sequence_ppo", lag_power=1.0),
}

#: The same with exact norms.
INGREDIENTS_EXACT = {
  "no correction + OPOB, exact": _method("reinforce", OPOB),
  "centered + OPOB, exact": _method("reinforce", OPOB, CENTERED),
}

#: Parts of TOPR and of PPO on sequence ratios: without failures; with the cap of failures on successes, too; with and
#: without the clip of the gradient's norm, which acts on sums over tokens at every step and hardly ever on means.
PARTS = {
  "successes alone": _method("topr_successes"),
  "seq TIS, cap 1": _method("sequence_tis_1"),
  "TOPR, sums": _method("topr_sum"),
  "sequence PPO, means": _method("sequence_ppo_mean"),
  "sequence PPO + ahead": _method("sequence_ppo", ahead=1.0),
}

#: Less momentum: what it averages is old as well, on top of the lag.
LESS_MOMENTUM = {
  "TOPR, momentum .5": _method("topr", b1=0.5),
  "TOPR, momentum 0": _method("topr", b1=0.0),
}

#: What the parts of the best make together, in the hope of reaching sync.
REACHING = {
  "TOPR, sums, momentum .97": _method("topr_sum", b1=0.97),
  "TOPR, sums + ahead, momentum .97": _method("topr_sum", ahead=1.0, b1=0.97),
  "TOPR, sums, momentum .5": _method("topr_sum", b1=0.5),
  "VESPO, momentum .97": _method("vespo", b1=0.97),
  "sequence PPO, momentum .5": _method("sequence_ppo", b1=0.5),
  "sequence PPO + ESS": _method("sequence_ppo", ESS),
}

#: The same with exact norms: TOPR, and other weights of a sequence.
TOPR_REACHING_EXACT = {
  "TOPR + OPOB, exact, momentum .97": _method("topr", OPOB, b1=0.97),
  "TOPR, sums + OPOB, exact": _method("topr_sum", OPOB),
  "TOPR, sums + OPOB, exact, momentum .97": _method("topr_sum", OPOB, b1=0.97),
  "TOPR, sums + OPOB, exact + ahead, momentum .97": _method("topr_sum", OPOB, ahead=1.0, b1=0.97),
}
REACHING_EXACT = {
  "VESPO + OPOB, exact": _method("vespo", OPOB),
  "sequence PPO + OPOB, exact, momentum .5": _method("sequence_ppo", OPOB, b1=0.5),
  "sequence PPO + ESS + OPOB, exact": _method("sequence_ppo", ESS, OPOB),
}

FALLING = {"fall": 1.0}

#: A learning rate that falls to nothing over the training: less drift of what draws, and less noise, towards its end.
SYNC_FALLING = {"sync, falling rate": _method("reinforce", FALLING)}
TOPR_FALLING = {
  "TOPR, falling rate": _method("topr", FALLING),
  "TOPR, momentum .5, falling rate": _method("topr", FALLING, b1=0.5),
}
SEQUENCE_FALLING = {"sequence PPO, momentum .97, falling rate": _method("sequence_ppo", FALLING, b1=0.97)}
#: The same under other corrections.
OTHERS_FALLING = {
  f"{name}, falling rate": (PUBLISHED | TOKEN_WEIGHTS | TRM)[name] | FALLING
  for name in ("TRM, bounds x 100", "VESPO", "DPPO", "PPO")
}
#: The same with exact norms.
FALLING_EXACT = {
  "sequence PPO + OPOB, exact, momentum .97, falling rate": _method("sequence_ppo", OPOB, FALLING, b1=0.97),
  "sequence PPO + OPOB, exact + ahead, momentum .97, falling rate": _method(
    "sequence_ppo", OPOB, FALLING, ahead=1.0, b1=0.97
  ),
}

#: The map of GAC by group of methods: thresholds, and the other choices at some of them, on several corrections.
GAC_MAP = {
  f"GAC {part}, {base}": {name: PUBLISHED[base] | knobs for name, knobs in make(base).items()}
  for base in gac.BASES
  for part, make in (("thresholds", gac.thresholds), ("choices", gac.choices))
}
#: The same of a correction in one group, from which a plan takes the best.
GAC_ON = {f"GAC on {base}": GAC_MAP[f"GAC thresholds, {base}"] | GAC_MAP[f"GAC choices, {base}"] for base in gac.BASES}

#: Controls: a knob of the first method is measured and given to a run of the second, at the same lag, rate and seed.
#: (method to be measured, curve, knob that its mean becomes or multiplies, method that it is given to)
CONTROLS = {
  "PPO + random skips": ("PPO + GAC", "skipped", "skip", PUBLISHED["PPO"]),
  "seq TIS, matched rate": ("ESS", "scale", "rate", PUBLISHED["seq TIS"]),
  "PPO, matched rate": ("PPO + ESS", "scale", "rate", PUBLISHED["PPO"]),
}
#: Controls of the map: the correction alone, which skips as often.
GAC_CONTROLS = {
  f"GAC at random, {base}": {
    gac.at_random(name): (name, "skipped", "skip", PUBLISHED[base]) for name in GAC_ON[f"GAC on {base}"]
  }
  for base in gac.BASES
}

#: Controls that need no measurement.
RAMPED = {f"{name}, ramped": PUBLISHED[name] | {"ramp": 2} for name in ("seq TIS", "PPO", "ESS", "PPO + GAC")}

#: The methods of the program with exact norms.
EXACT_NORMS = SYNC_EXACT | THIRD | EXACT | MOMENTUM_EXACT | INGREDIENTS_EXACT
EXACT_NORMS |= TOPR_REACHING_EXACT | REACHING_EXACT | FALLING_EXACT

METHODS = SYNC | PUBLISHED | AHEAD | CANDIDATES | SECOND | MOMENTUM | TOKEN_WEIGHTS | RAMPED | EXACT_NORMS
METHODS |= CENTERED_SCORES | INGREDIENTS | PARTS | LESS_MOMENTUM | REACHING | ESTR | TRM
METHODS |= SYNC_FALLING | TOPR_FALLING | SEQUENCE_FALLING | OTHERS_FALLING
for _group in GAC_ON.values():
  METHODS |= _group
#: All controls.
MATCHED = CONTROLS | {name: row for rows in GAC_CONTROLS.values() for name, row in rows.items()}
METHODS |= {name: row[3] for name, row in MATCHED.items()}
