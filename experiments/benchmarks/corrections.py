"""A judge of corrections and baselines: what each makes of a stale batch, against the gradient of fresh samples.

    python -m experiments.benchmarks.corrections           # two CPU cores, see corrections.md
    python -m experiments.benchmarks.corrections --smoke   # a minute; checks that it runs

The quickstart's policy is warm-started and trained on-policy for as many steps as the largest lag. Its last version is
then frozen. Batches are drawn with the weights of each lag (same prompts and random numbers at every lag), every method
makes a gradient at the frozen weights out of each batch, and these are compared with the mean gradient over many fresh
on-policy batches. Nothing is trained on what is judged.

Writes corrections.json, corrections_table.md and corrections.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from async_rl import learning
from async_rl import sampling
from async_rl import tasks
from async_rl.rollout import PromptStream
from async_rl.runtime import Experiment
from async_rl.runtime import StageInputs
from async_rl.runtime import override
from async_rl.types import Batch
from async_rl.types import Group
from experiments.benchmarks import _corrections_gradients as gradients
from experiments.benchmarks import _corrections_report as report
from experiments.configs import quickstart

Params = Any


def sample(run: StageInputs, tickets: Sequence[int]) -> list[Group]:
  """Returns finished groups under the sampler's current weights."""
  prompts = PromptStream(run.encoder, run.prompts, run.seed)
  requests = [prompts.request(ticket) for ticket in tickets]
  completions, size = sampling.generate(run.sampler, requests), run.samples
  groups = []
  for i, request in enumerate(requests):
    own = tuple(completions[i * size : (i + 1) * size])
    rewards = [run.encoder.task.reward(request.prompt, run.encoder.decode_last_turn(c), c.finish) for c in own]
    groups.append(Group(request, own, np.asarray(rewards, np.float32)))
  return groups


def train(experiment: Experiment, run: StageInputs, lags: Sequence[int]) -> dict[int, Params]:
  """Returns parameters on the host by their lag behind the last version, from a run on fresh samples."""
  learner, size = run.learner, experiment.options.training.groups
  state = learner.init(jax.random.key(run.seed), experiment.start and experiment.start(run))
  last, kept = max(lags), {}
  for version in range(last + 1):
    if last - version in lags:
      kept[last - version] = jax.device_get(state.params)
    if version == last:
      return kept
    run.sampler.set_weights(state.params, version)
    groups = sample(run, range(version * size, (version + 1) * size))
    state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
    if version % 16 == 0:
      rewards = np.mean([g.rewards for g in groups])
      print(f"step {version}: mean reward {rewards:.2f}, update {float(metrics['update/norm']):.2g}", flush=True)
  raise AssertionError("unreachable")


def batches(run: StageInputs, params: Params, version: int, first: int, count: int) -> Iterator[Batch]:
  """Yields independent batches of these weights; the same *first* gives the same prompts and random numbers."""
  shape = dataclasses.replace(run.learner.shape, rows=run.learner.shape.sequences)  # one micro-batch
  size = shape.sequences // run.samples
  run.sampler.set_weights(params, version)
  for i in range(count):
    groups = sample(run, range(first + i * size, first + (i + 1) * size))
    yield jax.device_put(learning.pack(groups, shape), jax.devices()[0])


def measure(experiment: Experiment, run: StageInputs, lags: Sequence[int], count: int, fresh: int) -> dict[str, Any]:
  """Returns what the tables show: by lag, statistics of the batches and the comparison of every method."""
  snapshots = train(experiment, run, lags)
  version, size = max(lags), experiment.options.training.groups
  final = jax.device_put(snapshots[0], jax.devices()[0])
  judge = gradients.Judge(experiment.policy, size, experiment.options.rollout.temperature)
  first = version * size
  drawn = batches(run, final, version, first, fresh)
  targets = _collect([jax.device_get(judge.targets(final, batch, version)[0]) for batch in drawn])
  means = {name: gradients.Mean(values) for name, values in targets.items()}
  print(f"{fresh} fresh batches: relative variance {means['sequence_mean'].relative_variance:.1f}", flush=True)
  first += fresh * size
  results = {}
  for lag in lags:
    found, shares, statistics = [], [], []
    for batch in batches(run, snapshots[lag], version - lag, first, count):
      gradient, share = jax.device_get(judge.methods(final, batch, version))
      found.append(gradient)
      shares.append(share)
      statistics.append(jax.device_get(judge.statistics(final, batch)))
    collected, methods = _collect(found), {}
    for name in gradients.NAMES:
      methods[name] = gradients.compare(collected[name], means[gradients.target_of(name)])
      if name in shares[0]:
        methods[name] |= {key: float(np.mean([s[name][key] for s in shares])) for key in shares[0][name]}
    averaged = {key: float(np.mean([s[key] for s in statistics])) for key in statistics[0]}
    results[str(lag)] = {"batches": averaged, "methods": methods}
    print(f"lag {lag}: sequence ESS {averaged['ess/sequence']:.2f}", flush=True)
  return {
    "device": jax.devices()[0].device_kind,
    "seed": run.seed,
    "sequences": size * run.samples,
    "batches": count,
    "fresh_batches": fresh,
    "targets": {name: {"variance": mean.relative_variance} for name, mean in means.items()},
    "lags": results,
  }


def _collect(found: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  return {name: np.stack([gradient[name] for gradient in found]) for name in found[0]}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, a policy that was hardly trained")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/corrections"), help="folder")
  parser.add_argument("--lags", type=int, nargs="+", default=[0, 4, 16, 64], help="in optimizer steps; 0 is added")
  parser.add_argument("--batches", type=int, default=16, help="batches judged at each lag")
  parser.add_argument("--fresh", type=int, default=64, help="batches of the on-policy gradient")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args(arguments)
  overrides: dict[str, Any] = quickstart.SMOKE if options.smoke else {}
  count, fresh = (3, 4) if options.smoke else (options.batches, options.fresh)
  with tempfile.TemporaryDirectory() as folder:
    given = overrides | {"run_dir": folder, "seed": options.seed}
    experiment = quickstart.build(override(quickstart.Options(), **given))
    with tasks.RewardPool(experiment.task, workers=0) as rewards:
      run = experiment.make_stage_inputs(rewards)
      result = measure(experiment, run, sorted({0, *options.lags}), count, fresh)
  options.out.mkdir(parents=True, exist_ok=True)
  (options.out / "corrections.json").write_text(json.dumps(result, indent=1) + "\n")
  text = report.tables(result)
  (options.out / "corrections_table.md").write_text(text)
  report.plot(result, options.out / "corrections.png")
  print(text)
  return result


if __name__ == "__main__":
  main()
