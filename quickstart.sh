#!/usr/bin/env bash
# Train the bundled tiny model to search, on a CPU and offline, from a fresh clone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./quickstart.sh [--ppo] [--seed N] [HYDRA_OVERRIDE...]

  --ppo       train with PPO instead of GRPO
  --seed N    another seed (default 0)
  overrides   any setting, e.g. trainer.total_steps=5 policy.optim.lr=1e-4

Results are in runs/quickstart/latest: summary.json, report.html, metrics.jsonl, trajectories.
TEXT
}

fail() {
    echo "quickstart: $*" >&2
    exit 1
}

train=./train_grpo.sh seed=0 run=runs/quickstart/latest overrides=()
while (($#)); do
    case $1 in
    --ppo) train=./train_ppo.sh ;;
    --seed) [[ ${2-} =~ ^[0-9]+$ ]] || fail "--seed takes a number, not '${2-}'" && seed=$2 && shift ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && fail "unknown option $1" ;;
    *=*)
        overrides+=("$1")
        if [[ $1 == run_dir=* ]]; then run=${1#run_dir=}; fi
        ;;
    *) fail "'$1' is no setting: write key=value, e.g. trainer.total_steps=5" ;;
    esac
    shift
done

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" GOMP_SPINCOUNT=0 OMP_WAIT_POLICY=passive
work=$(mktemp -d) jobs=()

launch() { # launch COMMAND...: in a process group of its own, so that all of it can be ended
    set -m
    "$@" &
    jobs+=($!)
    set +m
}

end() { # end PID SIGNAL...: its whole process group, gently first, 10 s for each signal
    local pid=$1 signal
    for signal in "${@:2}"; do
        kill -s "$signal" -- "-$pid" 2>/dev/null || return 0
        for _ in {1..100}; do
            kill -0 -- "-$pid" 2>/dev/null || return 0
            sleep 0.1
        done
    done
}

clean_up() {
    trap '' INT TERM
    trap - EXIT
    if ((${#jobs[@]} > 1)); then end "${jobs[1]}" INT TERM KILL; fi # the trainer
    if ((${#jobs[@]} > 0)); then end "${jobs[0]}" TERM KILL; fi     # the server
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

.ci/setup.sh
source .ci/env.sh

launch ./retrieval_launch.sh --retriever bm25 --corpus examples/quickstart/corpus.jsonl \
    --port 0 --port-file "$work/port" >"$work/server.log" 2>&1
server=${jobs[0]}
probe='import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=5)'
for ((tries = 0; ; tries++)); do
    [ -s "$work/port" ] && url="http://127.0.0.1:$(<"$work/port")" \
        && "$PYTHON" -c "$probe" "$url/ready" 2>/dev/null && break
    if ((tries >= 200)) || ! kill -0 "$server" 2>/dev/null; then
        tail -n 20 "$work/server.log" >&2
        fail "the retrieval server did not start; its last lines stand above"
    fi
    sleep 0.3
done

export SEARCH_R1_SETUP_SECONDS=$SECONDS
launch "$train" experiment=quickstart "environment.retriever_urls=[$url/retrieve]" seed="$seed" \
    ${overrides[@]+"${overrides[@]}"}
wait "${jobs[1]}" || exit $?
"$PYTHON" -m search_r1.report "$run"
