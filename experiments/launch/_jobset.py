"""A JobSet of our own on any GKE cluster with TPUs and the JobSet controller."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from experiments.launch._commands import Command
from experiments.launch._job import LABEL
from experiments.launch._job import RESTART_STATUSES
from experiments.launch._job import Job
from experiments.launch._pods import Cluster
from experiments.launch._pods import Image
from experiments.launch._script import GRACE_SECONDS

_CONTAINER = "async-rl"


@dataclasses.dataclass(frozen=True)
class JobSet:
  """The pods of a run."""

  job: Job
  cluster: Image

  def create(self) -> tuple[Command, str | None]:
    return self.cluster.kubectl("apply", "--filename=-"), json.dumps(make_manifest(self.job, self.cluster), indent=2)

  def delete(self) -> Command:
    return delete_command(self.job.name, self.cluster)


def delete_command(name: str, cluster: Cluster) -> Command:
  """Returns the command that deletes a JobSet."""
  return cluster.kubectl("delete", "jobset", name, "--ignore-not-found")


def make_manifest(job: Job, cluster: Image) -> dict[str, Any]:
  """Returns the JobSet of a run, one replicated job with a replica for each slice and a pod for each host.

  A pod that ends with a status that no restart would help fails its job for its policy's sake, which ends the JobSet;
  every other failure, and a host that is preempted, restarts all pods.
  """
  topology = job.topology
  hosts = topology.hosts
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
      "name": job.name,
      "labels": {LABEL: job.name},
      "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    },
    "spec": {
      "failurePolicy": {
        "maxRestarts": job.max_restarts,
        "rules": [{"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
      },
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
      "replicatedJobs": [
        {
          "name": "slice",
          "replicas": job.slices,
          "template": {
            "spec": {
              "parallelism": hosts,
              "completions": hosts,
              "completionMode": "Indexed",
              "backoffLimit": 0,
              "podFailurePolicy": {"rules": [_fail_on_errors()]},
              "template": {"metadata": {"labels": {LABEL: job.name}}, "spec": _make_pod(job, cluster)},
            }
          },
        }
      ],
    },
  }


def _fail_on_errors() -> dict[str, Any]:
  statuses = {"containerName": _CONTAINER, "operator": "NotIn", "values": list(RESTART_STATUSES)}
  return {"action": "FailJob", "onExitCodes": statuses}


def _make_pod(job: Job, cluster: Image) -> dict[str, Any]:
  """Returns the description of a host's pod."""
  topology = job.topology
  chips = {"google.com/tpu": str(topology.chips_per_host)}
  variables = {"JAX_PLATFORMS": "tpu,cpu"} | {name: value for name, _, value in (v.partition("=") for v in job.env)}
  pod: dict[str, Any] = {
    "hostNetwork": True,
    "dnsPolicy": "ClusterFirstWithHostNet",
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": GRACE_SECONDS,
    "nodeSelector": {
      "cloud.google.com/gke-tpu-accelerator": topology.names.node_label,
      "cloud.google.com/gke-tpu-topology": topology.shape,
    },
    "containers": [
      {
        "name": _CONTAINER,
        "image": cluster.image,
        "command": list(job.training),  # without a shell, so that SIGTERM arrives
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"requests": chips, "limits": chips},
      }
    ],
  }
  if job.spot:
    pod["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
    pod["tolerations"] = [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}]
  return pod
