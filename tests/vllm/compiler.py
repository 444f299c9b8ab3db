#!/usr/bin/env python3
"""g++ that remembers what it has compiled; Inductor calls it in the compiled engines.

vLLM gives every graph a cache directory of its own, so that kernels which engines have in common
are compiled again for each. The caches that are tested do not notice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = "TESTS_VLLM_KERNELS"
"""Environment variable that names the folder to remember kernels in."""


def main(arguments: list[str]) -> int:
    """Compile, or copy what came of it the last time."""
    sources = [word for word in arguments if word.endswith(".cpp")]
    if len(sources) != 1 or "-o" not in arguments:
        return subprocess.call(["g++", *arguments])
    (source,), output = sources, arguments[arguments.index("-o") + 1]
    flags = [word for word in arguments if word not in (source, output)]
    key = hashlib.sha256(Path(source).read_bytes() + repr(flags).encode()).hexdigest()
    kept = Path(os.environ[FOLDER]) / key
    if kept.exists():
        shutil.copy(kept, output)
        return 0
    status = subprocess.call(["g++", *arguments])
    if status == 0:
        kept.parent.mkdir(exist_ok=True)
        shutil.copy(output, kept)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
