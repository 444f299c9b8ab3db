"""Our file of responses is what vLLM's encoder writes.

Its engine hands out routes with Triton alone, which runs on no CPU here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.formats.served import DATA
from tests.vllm.conftest import ENVIRONMENT, LIMIT, ROOT


def test_the_encoder_is_the_one_of_our_files(tmp_path: Path):
    command = [sys.executable, "-m", "tests.formats.served", "vllm", str(tmp_path / "a.jsonl")]
    subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, timeout=LIMIT)
    assert (tmp_path / "a.jsonl").read_bytes() == (DATA / "vllm.jsonl").read_bytes()
