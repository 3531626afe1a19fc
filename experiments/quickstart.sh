#!/usr/bin/env bash
# Installs async_rl into .venv and trains the quickstart experiment on this machine's CPU; options go to the trainer:
#   bash experiments/quickstart.sh [--steps 300] [--run-dir DIR] [--overwrite] ...
set -euo pipefail
export ASYNC_RL_TRAIN_COMMAND="bash $(printf %q "$0")"  # for the commands that a run suggests at its end
cd "$(dirname "$0")/.."
source experiments/setup_venv.sh
setup_venv "[train]"
# One device samples, the other one learns.
export JAX_PLATFORMS=cpu XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=2"
exec "$PYTHON" -m experiments.train quickstart "$@"
