# Shared by the scripts of deploy/ and tests/run: where things are, how progress is shown.
# Sourced, never run.

BATON_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BATON_CACHE=${BATON_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/baton}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# quietly WHAT LOGFILE COMMAND...: runs a long step, shows one line with a running clock, and the end
# of its log when it fails.
quietly() {
    local what=$1 log=$2 start=$SECONDS pid status=0
    shift 2
    mkdir -p "$(dirname "$log")"
    if [ -t 2 ]; then
        "$@" >"$log" 2>&1 </dev/null &
        pid=$!
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r\033[1m==>\033[0m %s ... %ds ' "$what" $((SECONDS - start)) >&2
            sleep 1
        done
        wait "$pid" || status=$?
        printf '\r' >&2
    else
        say "$what ..."
        "$@" >"$log" 2>&1 </dev/null || status=$?
    fi
    if [ "$status" -ne 0 ]; then
        printf '%s failed (status %d); the end of %s:\n' "$what" "$status" "$log" >&2
        tail -n 40 "$log" >&2
        return "$status"
    fi
    say "$what: done in $((SECONDS - start))s"
}
