"""A workload of xpk, which makes the JobSet for a cluster that `xpk cluster create` has made."""

from __future__ import annotations

import dataclasses
import shlex

from experiments.launch._commands import Command
from experiments.launch._job import Job
from experiments.launch._pods import Cluster
from experiments.launch._pods import Image
from experiments.launch._script import GRACE_SECONDS


@dataclasses.dataclass(frozen=True)
class Xpk:
  """The pods of a run."""

  job: Job
  cluster: Image

  def __post_init__(self):
    if self.job.spot:
      raise ValueError("*spot* must be False for xpk, got spot=True; `xpk cluster create --spot` makes such a cluster.")
    if self.job.topology.names.flat and self.job.topology.chips < 8:
      raise ValueError(
        f"*topology* must have at least 8 chips for xpk, got topology={self.job.topology}; tpu-vm, queued, gce and "
        "jobset have smaller ones."
      )
    if self.cluster.namespace != "default":
      raise ValueError(f"*namespace* must be default for xpk, got namespace={self.cluster.namespace!r}.")

  def create(self) -> tuple[Command, str | None]:
    job, cluster = self.job, self.cluster
    topology = job.topology
    kind = topology.accelerator_type if topology.is_usual else f"{topology.names.accelerator}-{topology.shape}"
    # With `exec`, the signal that xpk's own shell passes on reaches Python. xpk restarts on 42 and 127 to 255.
    training = f"exec {shlex.join(job.training)}"
    return (
      *("xpk", "workload", "create", f"--workload={job.name}", *_where(cluster), f"--tpu-type={kind}"),
      *(f"--num-slices={job.slices}", f"--docker-image={cluster.image}", f"--max-restarts={job.max_restarts}"),
      *(f"--termination-grace-period-seconds={GRACE_SECONDS}", "--env=JAX_PLATFORMS=tpu,cpu"),
      *(f"--env={variable}" for variable in job.env),
      f"--command={training}",
    ), None

  def delete(self) -> Command:
    return delete_command(self.job.name, self.cluster)


def delete_command(name: str, cluster: Cluster) -> Command:
  """Returns the command that deletes a workload."""
  return ("xpk", "workload", "delete", f"--workload={name}", *_where(cluster), "--force")


def _where(cluster: Cluster) -> Command:
  return (f"--cluster={cluster.cluster}", *cluster.account, f"--zone={cluster.location}")
