#!/usr/bin/env bash
# Start the retrieval server, e.g. ./retrieval_launch.sh --retriever bm25 --corpus corpus.jsonl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
exec "$PYTHON" -m retriever_server "$@"
