"""Launches a run on Cloud TPUs: `python -m experiments.launch BACK_END CONFIG --topology v5e:4x4 --run-dir gs://...`.

`_job.py` describes a run on TPUs. Of the back ends, `_tpu_vm.py`, `_queued.py` and `_gce.py` say how machines are
created, found and deleted, and `_follow.py` and `_machines.py` do the rest for all three; `_xpk.py` and `_jobset.py` do
the same for clusters of Kubernetes, with `_pods.py`.
"""
