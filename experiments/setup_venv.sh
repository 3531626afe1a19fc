# Sourced by quickstart.sh and tests/run.sh from the repository's root: `setup_venv EXTRAS` makes .venv if there is
# none, installs the package with the extras when setup.py changed, and sets PYTHON.

setup_venv() {
  local python=python3 candidate mark extras="$1"
  for candidate in python3.12 python3.11 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
  done
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed, found $("$python" --version 2>&1); install it and run this again." >&2
    return 1
  fi
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  PYTHON=$PWD/.venv/bin/python
  mark=$(cksum setup.py | cut -d' ' -f1)-$("$PYTHON" -V | tr -d ' ')
  if ! grep -qsxF "$mark$extras" .venv/installed; then
    echo "Installing async_rl$extras into .venv ..."
    "$PYTHON" -m pip install --quiet --upgrade pip
    "$PYTHON" -m pip install --quiet --editable ".$extras"
    echo "$mark$extras" >> .venv/installed
  fi
}
