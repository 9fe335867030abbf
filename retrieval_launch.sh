#!/usr/bin/env bash
# Start the retrieval server, e.g. ./retrieval_launch.sh --retriever bm25 --corpus corpus.jsonl
set -euo pipefail
from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
PYTHON="$(command -v "$PYTHON")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ "$PYTHON" != /* ]]; then PYTHON="$PWD/$PYTHON"; fi
cd "$from" # relative paths are the caller's
exec "$PYTHON" -m retriever_server "$@"
