#!/usr/bin/env bash
# Makes a virtual environment in which SGLang's engine runs on a CPU, with nothing but PyPI.
#
#   tests/sglang/environment.sh VENV [engine]
#
# With "engine", this package is left for later: nothing outside VENV is touched until then.
#
# SGLang's own requirements name kernels and torch builds for accelerators. The wheel therefore goes
# in alone, beside what its engine really imports; stand_ins.py takes the place of the few modules
# that are imported and never used.
set -euo pipefail

venv=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir"

if [ -e "$venv/.installed" ] && [ "$venv/.installed" -nt "$here/tests/sglang/stand_ins.py" ]; then
    exit 0
fi

if [ ! -e "$venv/.engine" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    $pip torch==2.13.0 setuptools==78.1.1 wheel 'numpy<2.4' transformers==5.19.0 \
        pyarrow pandas typer rich pytest pytest-timeout \
        aiohttp anthropic compressed-tensors diskcache distro easydict einops fastapi gguf \
        interegular ipython jsonschema llguidance modelscope msgspec ninja numba nvidia-ml-py \
        openai==2.8.0 orjson packaging partial-json-parser pillow prometheus-client psutil \
        pybase64 pycountry pydantic python-multipart pyzmq referencing requests scipy \
        sentencepiece setproctitle soundfile tiktoken triton uvicorn uvloop watchfiles \
        websockets xgrammar xxhash zstandard
    $pip --no-deps sglang==0.5.23 datasets multiprocess dill outlines==0.1.11 \
        outlines_core==0.1.26 airportsdata lark openai-harmony torch_memory_saver
    touch "$venv/.engine"
fi
if [ "${2:-}" = engine ]; then exit 0; fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/tests/sglang/stand_ins.py" "$site/sglang_stand_ins.py"
echo 'import sglang_stand_ins' > "$site/sglang_stand_ins.pth"
# Both engines may get here at the same time, and setuptools writes into the checkout.
flock "$here/pyproject.toml" $pip --no-deps -e "$here"
touch "$venv/.installed"
