"""The Triton kernels on machines without a CUDA device.

Each in a process of its own: Triton decides when it is imported whether it interprets, and its
interpreter patches its language; neither may reach the other tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HAS_TRITON = find_spec("triton") is not None
# Earlier interpreters fail with numpy 2.4.
INTERPRETS = HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def python(*arguments: str, **environment: str) -> str:
    """What a Python process with these arguments printed; fails with it if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not INTERPRETS, reason="Triton 3.7 or later is not installed")
def test_kernels_under_the_interpreter():
    """tests/gpu/test_kernels.py, on the CPU."""
    options = "-q -p no:xdist -p no:cacheprovider".split()
    printed = python("-m", "pytest", *options, "tests/gpu/test_kernels.py", TRITON_INTERPRET="1")
    # All but the prefills, which take too long there.
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", printed).groups()
    assert int(passed) > 150
    assert int(skipped) == 3


@pytest.mark.skipif(not INTERPRETS, reason="Triton 3.7 or later is not installed")
def test_the_engine_capture_counts_through_them():
    """The wiring: the same tests as with torch operators, under the interpreter."""
    tests = ["test_only_real_rows_count[device-4-9]", "test_invalid_ids_are_tallied[device]"]
    paths = [f"tests/capture/test_engine.py::{name}" for name in tests]
    options = "-q -p no:xdist -p no:cacheprovider".split()
    assert "2 passed" in python("-m", "pytest", *options, *paths, TRITON_INTERPRET="1")


@needs_triton
def test_kernels_compile_for_cuda(tmp_path):
    printed = python("-m", "tests.gpu.compiled", TRITON_CACHE_DIR=str(tmp_path))
    assert len(re.findall(r"^_count_layer sm_90: \d+ bytes$", printed, re.MULTILINE)) == 5
    assert len(re.findall(r"^_fold_steps sm_90: \d+ bytes$", printed, re.MULTILINE)) == 1


def test_capture_does_not_import_triton():
    files = (ROOT / "routeprof" / "capture").glob("*.py")
    modules = {file.stem for file in files} - {"__init__", "fused"}
    imports = "; ".join(f"import routeprof.capture.{module}" for module in sorted(modules))
    assert python("-c", f"import sys; {imports}; print('triton' in sys.modules)") == "False\n"


def test_without_triton_the_kernels_are_not_available():
    hide = "import sys; sys.modules['triton'] = None"
    ask = "from routeprof.capture import fused; print(fused.available())"
    assert python("-c", f"{hide}; {ask}") == "False\n"


@needs_triton
def test_with_triton_they_are():
    ask = "from routeprof.capture import fused; print(fused.available())"
    assert python("-c", ask) == "True\n"
