#!/usr/bin/env bash
# Start the retrieval server, e.g. ./retrieval_launch.sh --retriever bm25 --corpus corpus.jsonl
set -euo pipefail
from="$(pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
root="$(pwd)"
PYTHON="$(command -v "$PYTHON")"
if [[ "$PYTHON" != /* ]]; then PYTHON="$root/$PYTHON"; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
cd "$from" # relative paths are the caller's
exec "$PYTHON" -m retriever_server "$@"
