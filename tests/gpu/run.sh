#!/usr/bin/env bash
# All that needs a CUDA device: the kernels against their twin, counts under graph replay, and what
# counting costs. A few minutes. PYTHON names the interpreter that has torch for CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
status=0
"$PYTHON" -m pytest tests/gpu -m gpu -q -p no:cacheprovider || status=$?
# 5 is pytest's word for: there was nothing to run.
if test "$status" != 0 && test "$status" != 5; then exit "$status"; fi
"$PYTHON" -W ignore -m tests.gpu.bench
exit "$status"
