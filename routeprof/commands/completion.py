"""What a shell offers for the values of options: names alone, so that Tab answers at once.

Lists whose own modules import arrays are written out here; ``test_completion.py`` compares them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from routeprof.topology import LEVELS, PHASES

Complete = Callable[[str], list[str]]

READ = (
    "sglang",
    "responses",
    "vllm-log",
    "esft",
    "cd-moe",
    "trtllm",
    "imatrix",
    "megatron",
    "moe-cap",
    "mbolt",
    "moe-trace",
    "npy",
    "csv",
)
WRITTEN = ("trace", "sglang", "sglang-pt", "npy", "csv", "arrow", "parquet")
PLACED = ("sglang", "trtllm", "vllm", "eplb", "vllm-ascend", "csv")
EFFORTS = ("low", "normal", "high")
PLACINGS = ("contiguous", "eplb", "routeprof")
RULES = ("ceil", "floor", "deepspeed", "per-rank")
SEVERITIES = ("info", "warning", "error")
METHODS = ("auto", "remote_exec", "gdb", "lldb")
DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4")
CACHE_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")


def one_of(names: Iterable[str]) -> Complete:
    """Offers the names that go on from what is typed."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def some_of(names: Iterable[str]) -> Complete:
    """The same for a list between commas: completes its last name with one not yet in it."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        return [
            before + comma + name for name in known if name.startswith(last) and name not in taken
        ]

    return complete


levels = one_of(LEVELS)
phases = one_of(PHASES)


def models(incomplete: str) -> list[str]:
    """Models that are known by name; the shell goes on with files where none is meant."""
    from routeprof.plan.known import known_names

    return one_of(known_names())(incomplete)


def gpus(incomplete: str) -> list[str]:
    """GPUs whose rates are known."""
    from routeprof.whatif.hardware import HARDWARE

    return one_of(HARDWARE)(incomplete)


def attached(incomplete: str) -> list[str]:
    """Processes that ``routeprof attach`` noted and that are still there."""
    notes = Path(tempfile.gettempdir()) / f"routeprof-{os.getuid()}"
    pids = [note.stem for note in notes.glob("*.json") if Path("/proc", note.stem).exists()]
    return one_of(sorted(pids))(incomplete)
