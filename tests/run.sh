#!/usr/bin/env bash
# The project's one check: lint, format, types, unit tests and doctests, a smoke run of every config, the notebooks.
# Makes its own virtual environment.   bash tests/run.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
source experiments/setup_venv.sh
setup_venv "[test]"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy --config-file tests/mypy.ini async_rl experiments
exec "$PYTHON" -m pytest -c tests/pytest.ini --rootdir=. -n 2 --dist loadfile "$@"
