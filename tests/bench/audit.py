"""How fast ``routeprof audit`` goes through a checkpoint, and in how much memory.

A synthetic checkpoint is written (or kept from before), then in turn read whole into one buffer, by
one thread and by one for each processor, and audited in a fresh process, from the disk and from the
page cache. The ratio is to one thread's reading. Other work on the machine changes all figures, and
processor time the least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from routeprof.plan.weights import ENOUGH
from tests.bench.kept import Figure, figure

GIB = 1024**3
HIDDEN, WIDTH, EXPERTS = 2048, 1024, 64
CHUNK = 1024**2
DEFAULT = HIDDEN * WIDTH // ENOUGH
"""What the command samples of matrices of that size."""

AUDIT = """
import json, resource, sys, time
from pathlib import Path
from routeprof.plan.weights import audit
start, cpu = time.perf_counter(), time.process_time()
done = audit(Path(sys.argv[1]), sample=int(sys.argv[2]))
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": done.read, "peak": peak}))
"""


def write(directory: Path, size: int) -> Path:
    """A checkpoint of one layer after the other, of so many bytes, without holding it in memory."""
    each = HIDDEN * WIDTH * 2
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
        for layer in range(-(-size // (each * 3 * EXPERTS)))
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    header = {
        name: {
            "dtype": "BF16",
            "shape": [HIDDEN, WIDTH] if "down" in name else [WIDTH, HIDDEN],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    file = directory / "model.safetensors"
    if file.exists() and file.stat().st_size == 8 + len(text) + len(names) * each:
        return file
    torch.manual_seed(0)
    values = (torch.randn(HIDDEN * WIDTH * 2) * 0.02).bfloat16()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for number in range(len(names)):
            part = values[number * 997 : number * 997 + HIDDEN * WIDTH]
            stream.write(part.view(torch.uint8).numpy().tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    return file


def forget(file: Path) -> None:
    """Out of the page cache with it, so that the disk must be read."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(file: Path, threads: int = 1) -> tuple[float, float]:
    """Seconds, and those of processors, that plain reading takes; a buffer for each thread."""
    size = file.stat().st_size
    share = -(-size // threads)

    def part(first: int) -> None:
        buffer = memoryview(bytearray(CHUNK))
        with file.open("rb", buffering=0) as stream:
            stream.seek(first)
            left = min(share, size - first)
            while left > 0:
                left -= stream.readinto(buffer[:left]) or left

    with ThreadPoolExecutor(threads) as pool:
        start, cpu = time.perf_counter(), time.process_time()
        list(pool.map(part, range(0, size, share)))
        return time.perf_counter() - start, time.process_time() - cpu


def audited(file: Path, sample: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(file), str(sample)],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """The suite's name, how it was measured, and its figures."""
    parser = argparse.ArgumentParser(prog="make bench-audit", description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="not all groups, which takes long")
    parser.add_argument("--directory", type=Path, help="keep the checkpoint there")
    options = parser.parse_args(arguments)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        file = write(directory, int(options.gib * GIB))
        size = file.stat().st_size
        for place in ("disk, cold", "page cache"):
            for sample in (DEFAULT, 1)[: 1 if options.quick else 2]:
                rounds = [turn(file, size, place, sample) for _ in range(options.rounds)]
                what = "all groups" if sample == 1 else f"1 in {sample} groups"
                figures += row(f"{place}, errors of {what}", rounds)
    yield "audit", f"{size / GIB:.2f} GiB of BF16, {options.rounds} rounds.", figures


def turn(file: Path, size: int, place: str, sample: int) -> dict[str, float]:
    """One round: reading by one thread, by all, and the audit."""

    def again() -> None:
        if place == "page cache":
            read(file)
        else:
            forget(file)

    again()
    plain, plain_cpu = read(file)
    again()
    together, _ = read(file, os.cpu_count() or 1)
    again()
    found = audited(file, sample)
    one, every, ours = (size / s / 1e9 for s in (plain, together, found["seconds"]))
    return {
        "read by one thread, GB/s": one,
        "by all, GB/s": every,
        "audit, GB/s": ours,
        "audit ÷ read": ours / one,
        "processor seconds to read": plain_cpu,
        "to audit": found["cpu"],
        "peak MiB": found["peak"] / 1024**2,
    }


def row(name: str, rounds: list[dict[str, float]]) -> Iterator[Figure]:
    kinds: dict[str, dict[str, Any]] = {
        "audit, GB/s": {"unit": "GB/s", "better": "higher"},
        "audit ÷ read": {"better": "higher", "target": 0.5},
        "to audit": {"unit": "s", "better": "lower", "digits": 1},
        "peak MiB": {"unit": "MiB", "better": "lower", "digits": 0, "target": 1024.0},
        "processor seconds to read": {"unit": "s", "digits": 1},
    }
    for column in rounds[0]:
        options = {"digits": 2} | kinds.get(column, {"unit": "GB/s"})
        yield figure("audit", name, column, [one[column] for one in rounds], **options)
