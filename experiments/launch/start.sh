# Every host runs this when it starts; `python -m experiments.launch` puts the variables in capitals before it. It
# installs the code, trains, starts training again when that helps, and leaves its log and its state in STAGING.

home="${ASYNC_RL_HOME:-/opt/async_rl}"
metadata=http://metadata.google.internal/computeMetadata/v1/instance
host="${ASYNC_RL_HOST:-$(hostname)}"
log="$home/${STAGING##*/}.log"
export HOME="${HOME:-$home}" # services have none

if [ "${1:-}" = job ]; then
  shift
else
  # A service outlives this script, and is given time to save when the machine is stopped.
  mkdir -p "$home"
  systemctl stop async_rl 2> /dev/null || true
  cp "$0" "$home/start.sh"
  exec systemd-run --unit=async_rl --collect --property=After=network-online.target --property=KillMode=mixed \
    --property="TimeoutStopSec=$GRACE_SECONDS" bash "$home/start.sh" job
fi

# Prints the header of requests to the bucket, as the machine's service account.
authorize() {
  curl -sSf --retry 5 -H "Metadata-Flavor: Google" "$metadata/service-accounts/default/token" |
    sed 's/.*"access_token" *: *"\([^"]*\)".*/Authorization: Bearer \1/'
}

# Copies an object of STAGING to a file.
fetch() {
  authorize | curl -sSf --retry 5 -H @- -o "$2" "https://storage.googleapis.com/${STAGING#gs://}/$1"
}

# Copies a file to an object of STAGING.
store() {
  authorize | curl -sSf --retry 3 -H @- -T "$1" -o /dev/null "https://storage.googleapis.com/${STAGING#gs://}/$2"
}

# Leaves the log and the state of this host, with a number that changes every time.
report() {
  store "$log" "$host.log" || true
  echo "$(cat "$home/state") $(date +%s)" > "$home/reported"
  store "$home/reported" "$host.state" || true
}

finish() {
  trap - EXIT TERM INT
  kill "$reporter" 2> /dev/null || true
  wait "$reporter" 2> /dev/null || true # or it could overwrite what follows
  echo "ended $1" > "$home/state"
  report
  exit "$1"
}

# shellcheck disable=SC2329 # the trap calls it
stop() {
  stopping=1
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null || true
}

# Sets PYTHON and installs the code with its requirements into code/.venv, which a restart finds again.
install_code() {
  mkdir -p "$home/code"
  find "$home/code" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
  fetch code.tar.gz "$home/code.tar.gz"
  tar -xzf "$home/code.tar.gz" -C "$home/code"
  cd "$home/code"
  # shellcheck source=/dev/null
  source experiments/setup_venv.sh
  if ! PYTHON=$(find_python 2> /dev/null); then # images for TPUs have 3.10
    export UV_INSTALL_DIR="$home/bin" UV_PYTHON_INSTALL_DIR="$home/python" UV_NO_MODIFY_PATH=1
    curl -sSfL --retry 5 https://astral.sh/uv/install.sh | sh
    "$home/bin/uv" python install 3.12
    PYTHON=$("$home/bin/uv" python find 3.12)
  fi
  setup_venv "$EXTRAS"
}

# Sets the options by which the processes find each other, where JAX does not know them: the first host leaves its
# address in STAGING.
join_by_bucket() {
  local id
  id=$(curl -sSf --retry 5 -H "Metadata-Flavor: Google" "$metadata/attributes/worker-id")
  if [ "$id" = 0 ]; then
    curl -sSf --retry 5 -H "Metadata-Flavor: Google" "$metadata/network-interfaces/0/ip" > "$home/address"
    store "$home/address" coordinator
  fi
  until fetch coordinator "$home/address" 2> /dev/null; do sleep 5; done
  process=(--coordinator "$(cat "$home/address"):8482" --num-processes "$HOSTS" --process-id "$id")
}

# Runs a command and sets `status` to its exit status, also if this script is asked to stop meanwhile.
run() {
  "$@" &
  child=$!
  status=0
  wait "$child" || status=$?
  while kill -0 "$child" 2> /dev/null; do # a signal interrupted the wait
    status=0
    wait "$child" || status=$?
  done
  child=""
}

# Returns whether another start of training would help after exit status `status`.
helps() {
  local resumed
  case " $RESTART_STATUSES " in *" $status "*) ;; *) return 1 ;; esac
  [ -z "$stopping" ] && [ "$restarts" -lt "$MAX_RESTARTS" ] || return 1
  case "$status" in 134 | 137) ;; *) return 0 ;; esac
  # Aborts that come again before anything was saved are no preemptions.
  resumed=$(grep -o "resumed at step [0-9]*" "$log" | tail -n 1) || true
  [ "$resumed" = "$last_resumed" ] && same=$((same + 1)) || same=1
  last_resumed=$resumed
  if [ "$same" -ge 3 ]; then
    echo "Training ended with status $status three times without progress: no more restarts."
    status=1
    return 1
  fi
}

mkdir -p "$home"
cd "$home"
echo installing > state
exec >> "$log" 2>&1
child="" stopping="" status=143 restarts=0 same=0 last_resumed=none process=()
trap 'finish $?' EXIT
trap stop TERM INT
(
  trap - EXIT TERM INT
  while true; do
    report
    sleep "${ASYNC_RL_REPORT_SECONDS:-15}"
  done
) &
reporter=$!

install_code
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" # no silent fallback to the CPU
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$home/programs}"
export PYTHONUNBUFFERED=1
[ "$JOIN" != bucket ] || join_by_bucket
if [ -n "$PREPARE" ]; then
  PATH="$(dirname "$PYTHON"):$PATH" bash -euc "$PREPARE"
fi
while [ -z "$stopping" ]; do
  echo "running $restarts" > "$home/state"
  run "$PYTHON" "${TRAINING[@]}" "${process[@]}" "$@"
  echo "Training ended with status $status."
  helps || break
  restarts=$((restarts + 1))
  sleep "${ASYNC_RL_RESTART_SECONDS:-15}"
done
finish "$status"
