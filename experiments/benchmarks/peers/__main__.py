"""This project, transformers and Tunix on the same work: generation, and one learner step, with random weights.

    python -m experiments.benchmarks.peers --shape smollm2-135m  # CPU, float32; 16 minutes on a busy core
    python -m experiments.benchmarks.peers --shape qwen3-0.6b    # one GPU of 141 GB, bfloat16; Tunix needs --limit 300
    python -m experiments.benchmarks.peers --shape tiny          # any machine, two minutes; checks that it runs

The other systems are the extra `peers`, for an environment of its own, since Tunix holds others back:

    pip install -e ".[train,peers]"

Where PyTorch and transformers are there already, Tunix and the packages that it imports are enough, 2 MB in all, which
also a machine without a network takes:

    pip download --no-deps --dest wheels google-tunix google-metrax qwix clu perfetto pylatexenc
    pip install --no-deps --no-index wheels/*.whl

Generation draws the completions of groups of eight from the whole softmax at temperature 1; nothing ends them early.
The learner step is PPO's clip with GRPO's advantages, averaged over tokens, clipping by norm and AdamW, over the
prompts and completions of the same sizes, with float32 weights and nothing but the compute dtype in bfloat16. Every
system is in a process of its own and keeps it; they work in turns, so that what else the machine does meets all alike.

What differs: this project and Tunix return log-probabilities, transformers does not; this project computes a prompt
once for its group, the others eight times; Tunix's Qwen3 has fused attention on TPUs only, forms the logits of all
positions of a prompt, and computes the entropy in its step. This project recomputes what `remat="activations"` names,
the others nothing. The step of transformers is that of TRL's GRPOTrainer in plain PyTorch, without the trainer.

Prints a row per part and system and writes peers.json: seconds of each round, their median, the shortest and the
longest; tokens per second, drawn or (of the learner step) read; and `times_reference`: seconds by those of this project
in the same round, the median, the least and the largest. `cpu_seconds` and `cpu_times_reference` are of the time of the
process on all cores: on a CPU that others use, too, run it on one core (`OMP_NUM_THREADS=1 taskset --cpu-list 0 python
...`) and read these. A system without a result has `failed`, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
from typing import Any

from experiments.benchmarks.peers._turns import System
from experiments.benchmarks.peers._turns import summarize
from experiments.benchmarks.peers._turns import take_turns
from experiments.benchmarks.peers._work import PARTS
from experiments.benchmarks.peers._work import SHAPES

SYSTEMS = {
  system.name: system
  for system in (
    System("ours", "experiments.benchmarks.peers._ours"),
    System("transformers", "experiments.benchmarks.peers._transformers", ("torch", "transformers")),
    System("tunix", "experiments.benchmarks.peers._tunix", ("tunix",)),
  )
}


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
  parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
  parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument("--sequences", type=int, help="in groups of eight; by default as the shape has it")
  parser.add_argument("--micro-batch", type=int, help="sequences; by default as the shape has it")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--limit", type=float, default=240, help="seconds to wait for a system, compilation included")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("peers.json"))
  args = parser.parse_args(arguments)
  given = {"sequences": args.sequences, "micro_batch": args.micro_batch}
  work = dataclasses.replace(SHAPES[args.shape], **{name: value for name, value in given.items() if value is not None})
  # All processes have their memory on the same device: none may take it in advance.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  result: dict[str, Any] = {
    "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "shape": args.shape,
    "work": dataclasses.asdict(work),
    "reference": "ours",
  }
  for part in args.parts:
    rows = take_turns([SYSTEMS[name] for name in args.systems], part, work, args.repeats, args.limit)
    result[part] = summarize(rows, work.tokens_of(part), "ours")
    result["machine"]["load_after"] = os.getloadavg()[0]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in result[part].items():
      print(part, name, " ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
  main()
