#!/usr/bin/env bash
# Train with PPO (a critic, GAE) on Ray. Arguments are Hydra overrides, e.g. ./train_ppo.sh experiment=quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/env.sh
exec "$PYTHON" -m search_r1.main --config-name ppo "$@"
