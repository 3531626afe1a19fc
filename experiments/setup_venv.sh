# Sourced from the repository's root by quickstart.sh and tests/run.sh. `setup_venv EXTRAS` makes .venv where there is
# none that runs, installs the package with the extras, and sets PYTHON. A PYTHON that is set already is what .venv is
# made of; otherwise a Python of 3.11 to 3.13 is looked for.

# Prints the path of the first Python that works: the commands of version managers can exist and fail.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3 python}; do
    if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Python 3.11 or newer with the module ensurepip is needed; install it and run this again." >&2
  return 1
}

# Installs the package with EXTRAS into the environment FOLDER, unless the same was installed there before: with uv, which
# takes seconds, where it is there and works, as it may not behind some package indexes; otherwise with pip.
install_into() {
  local folder="$1" extras="$2" mark
  mark="$(cksum < setup.py | cut -d' ' -f1)-$("$folder/bin/python" -V | tr -d ' ')$extras"
  if ! grep -qsxF "$mark" "$folder/installed"; then
    echo "Installing async_rl$extras into $folder ..."
    { [ -x "$folder/bin/uv" ] && "$folder/bin/uv" pip install -q --python "$folder/bin/python" --editable ".$extras"; } ||
      .venv/bin/python -m pip --python "$folder/bin/python" install -qq --no-compile --editable ".$extras" || return 1
    echo "$mark" >> "$folder/installed"
  fi
}

setup_venv() {
  local python
  if ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python) || return 1
    "$python" -m venv --clear .venv
    .venv/bin/python -m pip install -qq --upgrade pip
    .venv/bin/python -m pip install -qq uv || echo "Without uv, installations take a minute longer."
  fi
  PYTHON=$PWD/.venv/bin/python
  install_into .venv "$1"
}
