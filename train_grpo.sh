#!/usr/bin/env bash
# Train with GRPO on Ray. Arguments are Hydra overrides, e.g. ./train_grpo.sh experiment=quickstart trainer.total_steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
exec "$PYTHON" -m search_r1.main --config-name grpo "$@"
