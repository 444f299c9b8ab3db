"""What hostile files cost: memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.formats.test_responses import array_file
from tests.formats.test_torch_file import _raw, rewritten

LIMIT = 500_000_000

CHILD = """
import json, re, sys, time
from pathlib import Path
from routeprof.errors import RouteprofError
from routeprof.formats import convert
for path in map(Path, sys.argv[1:]):
    began = time.perf_counter()
    try:
        convert([path], path.with_suffix(".run"))
        says = "read"
    except RouteprofError as error:
        says = str(error)
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
    print(json.dumps([path.name, says, peak, round(time.perf_counter() - began, 2)]), flush=True)
"""


def torch_file(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(24))
    return path


def hostile(folder: Path) -> list[Path]:
    files = [
        torch_file(folder / "lists.pt", b"\x80\x02" + b"]" * ((6 << 20) - 3) + b"."),
        torch_file(folder / "nothing.pt", b"\x80\x02" + b"N" * ((6 << 20) - 3) + b"."),
        torch_file(folder / "numbers.pt", b"\x80\x02" + b"J\xff\xff\xff\x7f" * 1_200_000 + b"."),
        torch_file(folder / "larger.pt", b"\x80\x02" + bytes(9 << 20)),
        torch_file(folder / "repeats.pt", _raw((1 << 22,), (0,))),
        torch_file(folder / "many.pt", _raw((1 << 20,), (0,), times=5000)),
        torch_file(folder / "wide.pt", _raw((10**9,), (1,))),
        rewritten(
            torch_file(folder / "bomb.pt", _raw((6,), (1,))),
            {"data/0": bytes(200 << 20)},
            zipfile.ZIP_DEFLATED,
        ),
    ]
    response = {"choices": [{"routed_experts": array_file("(1000000000, 61, 8)", b"abc")}]}
    high = {"choices": [{"routed_experts": [[[0, 2**31]]]}]}
    route = {"type": "route", "token_idx": 0, "layer": 0, "topk_ids": [0, 10**9]}
    texts = {
        "response.jsonl": json.dumps(response),
        "high.jsonl": json.dumps(high),
        "route.jsonl": json.dumps(route),
        "deep.json": '{"logical_count": ' + "[" * 3_000_000,
        "deep.jsonl": '{"routed_experts": ' + "[" * 3_000_000,
        "ragged.json": '{"logical_count": [' + "[1],[1,2]," * 300_000 + "[1]]}",
        "huge.json": '{"logical_count": [[' + "9" * 4_000_000 + "]]}",
        "cells.json": json.dumps({"0-99999": [1.0, 5, 0.2], "99999-0": [1.0, 5, 0.2]}),
        "wide.csv": "layer,expert,count\n0,1000000000,1\n1000000000,0,1\n",
        "expert_weights_1.txt": "1\t2\t" + "9" * 4_000_000,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        files.append(folder / name)
    np.lib.format.open_memmap(folder / "a.npy", mode="w+", dtype="<i8", shape=(2, 3)).flush()
    data = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(data.replace(b"(2, 3), ", b"(9**9,3)"))
    (folder / "b.npy").write_bytes(data.replace(b"(2, 3), }      ", b"(9999999, 999)}"))
    return [*files, folder / "a.npy", folder / "b.npy"]


def test_hostile_files_take_little_memory(tmp_path: Path):
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says what a process took at most")
    files = hostile(tmp_path)
    command = [sys.executable, "-c", CHILD, *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [name for name, *_ in lines] == [path.name for path in files]
    for name, says, peak, _ in lines:
        assert says != "read", name
        assert "\n" not in says, name
        assert len(says) < 600, name
        assert peak < LIMIT, name
