#!/usr/bin/env bash
# Measures on a machine with a GPU all that experiments/gpu/README.md lists, in at most 10 minutes, without network.
# Without uv: PYTHON=python3 experiments/gpu/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" experiments/gpu/run.py "$@"
