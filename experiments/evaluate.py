"""Evaluates a run's newest checkpoint: `python -m experiments.evaluate RUN_DIR [--samples 8] [--temperature 1.0]`.

Without options: greedy accuracy on the whole test split. With K samples per prompt also the mean over samples (avg@K)
and pass@k, the chance that at least one of k samples is right, for k = 1, 2, 4, … up to K. `--weights` evaluates other
weights on the run's task: a Hugging Face folder, a GGUF file or a name that `experiments.fetch_weights` takes.

On several hosts the same command runs on each of them, joined as in training; they deal the prompts among themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from async_rl import models
from async_rl import tasks
from async_rl._validation import check_number
from async_rl.runtime import PROCESS_OPTIONS
from async_rl.runtime import Devices
from async_rl.runtime import Experiment
from async_rl.runtime import Hosts
from async_rl.runtime import LocalSampler
from async_rl.runtime import check_same
from async_rl.runtime import complete
from async_rl.runtime import join_hosts
from async_rl.runtime import leave
from async_rl.runtime import mean_and_interval
from async_rl.runtime._options import MIN_TEMPERATURE
from async_rl.types import Prompt
from experiments._runs import RunDir
from experiments._runs import command
from experiments._runs import load_experiment
from experiments._runs import restore_policy


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
  """Returns the unbiased estimate of pass@k, float [N]: the chance that one of k samples is right.

  It is 1 - C(n - c, k) / C(n, k) for c of n samples correct (Chen et al., Evaluating Large Language Models Trained on
  Code, 2021, https://arxiv.org/abs/2107.03374, equation 1).

  Args:
    correct: c of each prompt, int [N].
    samples: n, the number of samples of a prompt.
    k: the number of samples to draw, at most n.
  """
  if not 1 <= k <= samples:
    raise ValueError(f"k must lie in 1..samples={samples}, got k={k}.")
  return np.array([1.0 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct])


def load_weights(experiment: Experiment, weights: str) -> tuple[Experiment, models.Checkpoint]:
  """Opens other weights for a run; returns the experiment with their policy, without adapters, and the weights.

  Raises:
    ValueError: if they are of another architecture, since its tokenizer would be another one too.
  """
  checkpoint = models.open_checkpoint(models.find_weights(weights))
  mine = dataclasses.replace(experiment.policy, lora=None)
  config = dataclasses.replace(checkpoint.config, vocab_limit=mine.config.vocab_limit)
  theirs = dataclasses.replace(mine, config=config)
  if theirs.abstract() != mine.abstract():
    fields = (field.name for field in dataclasses.fields(config))
    pairs = ((name, getattr(mine.config, name), getattr(config, name)) for name in fields)
    changes = "; ".join(f"{name}: {a} -> {b}" for name, a, b in pairs if a != b)
    raise ValueError(f"{weights} is of another model than the run's ({changes}); give weights of the same one.")
  return dataclasses.replace(experiment, policy=theirs), checkpoint


def score(
  experiment: Experiment,
  params: models.Params,
  prompts: Sequence[Prompt],
  samples: int,
  temperature: float,
  hosts: Hosts | None = None,
) -> tuple[np.ndarray, list[str]]:
  """Completes prompts, in several processes if there are, and scores the completions.

  Args:
    experiment: the run.
    params: the parameters, on the learner mesh.
    prompts: the prompts.
    samples: the number of completions of each prompt.
    temperature: the temperature of sampling.
    hosts: the processes; `None` for this one alone.

  Returns:
    The rewards, float [N, samples], and the reasons of those that failed.
  """
  meshes = experiment.make_meshes()
  parts = models.row_parts(meshes.generation)
  slots = -(-max(experiment.options.rollout.slots, samples) // parts) * parts
  config = dataclasses.replace(experiment.sampler_config, group_size=samples, temperature=temperature, slots=slots)
  sampler = experiment.make_sampler(config, meshes.generation)
  LocalSampler(sampler, experiment.make_learner(meshes.learner)).set_weights(params, 0)
  encoder, devices = experiment.encoder, experiment.options.devices
  requests = [encoder.encode(i, prompt) for i, prompt in enumerate(prompts)]
  with tasks.RewardPool(experiment.task, devices.reward_workers, devices.reward_timeout) as pool:
    groups = complete(sampler, encoder, requests, samples, pool, hosts=hosts)
  results = [group.results for group in groups]
  reasons = [result.reason for of_group in results for result in of_group if result.failed]
  return np.array([[result.value for result in of_group] for of_group in results]), reasons


def evaluate(
  run_dir: RunDir,
  /,
  samples: int = 1,
  temperature: float | None = None,
  prompts: int | None = None,
  split: str = "test",
  step: int | None = None,
  weights: str | None = None,
  max_completion_tokens: int | None = None,
  max_prompt_tokens: int | None = None,
  skip_bad_prompts: bool = False,
  config: str | None = None,
  coordinator: str | None = None,
  process_id: int | None = None,
  num_processes: int | None = None,
) -> dict[str, float]:
  """Prints and returns the accuracy of a checkpoint.

  Args:
    run_dir: the folder of the run, on a disk or gs://bucket/folder.
    samples: K, the number of completions of each prompt.
    temperature: the temperature of sampling; by default 0 (greedy) for one sample, the run's own for more.
    prompts: the number of prompts of the split, from its start; by default all.
    split: "test" or "train".
    step: the step of the checkpoint; by default the newest.
    weights: a Hugging Face folder, a GGUF file or a name that `experiments.fetch_weights` takes, to evaluate instead.
    max_completion_tokens: the length of the longest completion; by default the run's.
    max_prompt_tokens: the length of the longest prompt; by default the run's.
    skip_bad_prompts: whether to leave out prompts that are too long or otherwise of no use; the run may say so, too.
    config: the path of the run's config file, if it was moved.
    coordinator: host and port of process 0 of several, where the environment does not tell (as on TPUs).
    process_id: the number of this process, from 0 on.
    num_processes: the number of processes.

  Raises:
    ValueError: if an option means nothing, prompts are of no use, or all rewards fail.
    HostError: if processes were started with other options, or one of them failed.
  """
  options = {name: value for name, value in locals().items() if name not in PROCESS_OPTIONS}
  with join_hosts(Devices(coordinator=coordinator, process_id=process_id, num_processes=num_processes)) as hosts:
    check_same(hosts, options)
    check_number("samples", samples, whole=True, at_least=1)
    if prompts is not None:
      check_number("prompts", prompts, whole=True, at_least=1, remedy="leave it out for all")
    if temperature not in (None, 0):
      check_number("temperature", temperature, at_least=MIN_TEMPERATURE, remedy="0 is greedy")
    limits = {"max_completion_tokens": max_completion_tokens, "max_prompt_tokens": max_prompt_tokens}
    changes = {name: value for name, value in limits.items() if value is not None}
    if changes:
      changes["row_tokens"] = 0  # what these lengths need; nothing is trained here
    if skip_bad_prompts:
      changes["skip_bad_prompts"] = True
    experiment = load_experiment(run_dir, config, **changes)
    if temperature is None:
      temperature = 0.0 if samples == 1 else experiment.options.rollout.temperature
    mesh = experiment.make_meshes().learner
    if weights is None:
      params, step = restore_policy(experiment, experiment.make_learner(mesh), step)
      evaluated = f"step {step}"
    else:
      experiment, checkpoint = load_weights(experiment, weights)
      params = models.load_params(checkpoint, experiment.make_learner(mesh).state_shardings.params)
      evaluated = weights
    found = experiment.task.prompts(split)[:prompts]
    check = experiment.encoder.check(found, skip=experiment.options.rollout.skip_bad_prompts)
    rewards, failures = score(experiment, params, check.select(found), samples, temperature, hosts)
    if len(failures) == rewards.size:
      raise ValueError(f"all {rewards.size} rewards failed, the first: {failures[0]}")
    results = {f"avg@{samples}": mean_and_interval(rewards.mean(axis=1))}
    correct = (rewards >= 1.0).sum(axis=1)
    for k in [2**i for i in range(samples.bit_length()) if samples > 1]:
      results[f"pass@{k}"] = mean_and_interval(pass_at_k(correct, samples, k))
    lines = [f"{experiment.name}, {evaluated}, {len(rewards)} {split} prompts, temperature {temperature:g}"]
    if check.skipped and (left_out := check.describe()):
      lines.append(left_out)
    if failures:
      lines.append(f"{len(failures)} of {rewards.size} rewards failed and count as 0, the first: {failures[0]}")
    lines += [f"{name:8} {mean:.4f} ± {half:.4f}" for name, (mean, half) in results.items()]
    if hosts.first:
      print("\n".join(lines))
    return {name: mean for name, (mean, _) in results.items()}


def main(arguments: list[str] | None = None) -> int:
  return command(evaluate, "evaluate", __doc__, arguments)


if __name__ == "__main__":
  leave(main())
