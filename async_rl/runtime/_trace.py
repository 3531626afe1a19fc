"""The programs of a run, traced from shapes alone, and the arrays that stay in the memory of its devices.

The devices need not be there: they may be those of a TPU topology, for which the programs can then be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax

from async_rl import models
from async_rl import sampling
from async_rl.rollout._mesh import Meshes
from async_rl.rollout._mesh import takes_programs
from async_rl.rollout._weight_push import WeightPush
from async_rl.runtime._experiment import Experiment

#: The devices that a program runs on.
Side = Literal["learner", "generation"]


class RunProgram(NamedTuple):
  """A program of a run.

  Attributes:
    side: the devices that it runs on.
    trace: the function that traces it.
    resident: those of its arguments that stay in memory while other programs run, a tree of ShapeDtypeStructs.
    makes: the arrays that it makes together with the programs before it and that are all there when it ends; `None` if
      these are its own results.
  """

  side: Side
  trace: Callable[[], jax.stages.Traced]
  resident: Any
  makes: Any = None


class RunTrace(NamedTuple):
  """The programs of a run and the arrays that stay in memory.

  Attributes:
    meshes: the devices by role.
    programs: the programs by name: "step", "score" (of runs with a reference policy), "stage" and "gather" of a weight
      push, "prefill", "put" and "decode" of the longest prompts and the longest cache.
    resident: for each side, the trees of ShapeDtypeStructs that its devices hold all the time, by kind.
    engines: the number of engines that generate in a process: one on each device if the compiler takes no program of
      several, whose programs are then those of one device; otherwise 1.
  """

  meshes: Meshes
  programs: dict[str, RunProgram]
  resident: dict[Side, dict[str, Any]]
  engines: int = 1


def trace_run(experiment: Experiment, devices: Sequence[jax.Device]) -> RunTrace:
  """Returns the programs of a run on given devices; process 0 of them is this one. Computes nothing.

  Stages before the run, such as supervised training, are left out; they are smaller.

  Raises:
    ValueError: if the experiment brings a sampler of its own, or its options do not fit the devices.
  """
  if experiment.sampler is not sampling.Engine:
    raise ValueError(f"The programs of {experiment.sampler!r} are not known; plan with sampling.Engine.")
  meshes = experiment.make_meshes(devices)
  learner, state = _traced_learner(experiment, meshes)
  engine, sampler = _traced_engine(experiment, experiment.sampler_config, meshes.generation, devices)
  trained = models.split_trainable(state["parameters"])[0]
  push = WeightPush(trained, experiment.policy.dtype, engine.param_shardings).trace()
  programs = {
    **learner,
    "stage": RunProgram("learner", push.pop("stage"), trained),
    **{name: RunProgram("generation", trace, None, makes=sampler["weights"]) for name, trace in push.items()},
  }
  traces = engine.trace_longest()
  programs["prefill"] = RunProgram("generation", traces["prefill"], sampler["weights"])
  programs["put"] = RunProgram("generation", traces["put"], sampler.get("prompts", sampler["cache"]))
  programs["decode"] = RunProgram("generation", traces["decode"], sampler)
  if experiment.options.output.eval_prompts:
    state = state | _evaluator_arrays(experiment, meshes, devices)
  engines = 1 if takes_programs(meshes.generation, devices) else meshes.generation.size
  return RunTrace(meshes, programs, {"learner": state, "generation": sampler}, engines)


def _traced_learner(experiment: Experiment, meshes: Meshes) -> tuple[dict[str, RunProgram], dict[str, Any]]:
  """Returns the programs of the learner and what it keeps."""
  learner = experiment.make_learner(meshes.learner)
  state, reference = learner.abstract(), experiment.keeps_reference
  kept = {"parameters": state.params, **_split_optimizer(state.opt_state)}
  if reference:
    kept["reference"] = learner.abstract_reference()
  programs = {"step": RunProgram("learner", lambda: learner.trace_step(reference), kept)}
  if reference:
    programs["score"] = RunProgram("learner", learner.trace_score, state.params)
  return programs, kept


def _traced_engine(
  experiment: Experiment, config: sampling.SamplerConfig, mesh: jax.sharding.Mesh, devices: Sequence[jax.Device]
) -> tuple[sampling.Programs, dict[str, Any]]:
  """Returns the programs of a sampler, or of its engine on the first device if each has one, and what it keeps."""
  if not takes_programs(mesh, devices):
    config, (mesh, *_) = sampling.split_engines(config, mesh)
  engine = sampling.Programs(experiment.policy, config, experiment.tokenizer.stop_ids, mesh)
  kept = {"weights": engine.params, "cache": engine.layers(*engine.shapes[-1])}
  if count := engine.usual_prompts:
    kept["prompts"] = engine.layers(count, engine.prompts)
  return engine, kept


def _evaluator_arrays(experiment: Experiment, meshes: Meshes, devices: Sequence[jax.Device]) -> dict[str, Any]:
  """Returns what the sampler of evaluations keeps on the learner's devices."""
  config, mesh = experiment.evaluation_setup(meshes.learner)
  kept = _traced_engine(experiment, config, mesh, devices)[1]
  return {f"evaluator's {kind}": arrays for kind, arrays in kept.items()}


def _split_optimizer(opt_state: Any) -> dict[str, Any]:
  """Splits the optimizer's state into the arrays of stabilizers and those of everything else."""
  kinds: dict[str, list[Any]] = {"optimizer": [], "stabilizers": []}

  def visit(node: Any, kind: str) -> None:
    if isinstance(node, jax.ShapeDtypeStruct):
      kinds[kind].append(node)
      return
    if hasattr(node, "_fields"):
      kind = "stabilizers" if type(node).__module__.startswith("async_rl.stabilizers") else "optimizer"
    for child in jax.tree.leaves(node, is_leaf=lambda x: x is not node):
      visit(child, kind)

  visit(opt_state, "optimizer")
  return dict(kinds)


def bytes_per_device(arrays: Any) -> int:
  """Returns the bytes that a device holds of a tree of ShapeDtypeStructs with shardings, padding aside."""
  total = 0
  for x in jax.tree.leaves(arrays):
    shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
    total += math.prod(shape) * x.dtype.itemsize
  return total
