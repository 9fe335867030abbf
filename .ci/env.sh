# Sourced by the launch scripts: which Python, and thread settings that keep a busy machine fast (docs/decisions.md).
PYTHON=python3
if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-0}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
