#!/usr/bin/env bash
# Evaluate a model without the trainer, e.g. ./evaluate.sh model=path/or/name data=questions.parquet
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
exec "$PYTHON" -m search_r1.evaluate "$@"
