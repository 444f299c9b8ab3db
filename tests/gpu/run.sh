#!/usr/bin/env bash
# All that needs a CUDA device: the kernels against their twin, counts under graph replay, and what
# counting costs. A few minutes. PYTHON names the interpreter that has torch for CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
status=0
"$PYTHON" -m pytest tests/gpu -m gpu -q -p no:cacheprovider || status=$?
if test "$status" = 5; then exit 0; fi # pytest had nothing to run, and has said why
"$PYTHON" -W ignore -m tests.gpu.bench
exit "$status"
