"""Keeping the drain thread off the engine's cores."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*$")
_LOADED = Path("/proc/self/maps")


def stay_single() -> None:
    """Make torch operators of the calling thread run on this thread alone.

    A second thread that enters an OpenMP region gets a pool of its own. From then on there are
    more OpenMP threads than cores, the runtime stops spinning at its barriers, and every
    parallel operator of the engine waits for the scheduler: decode took 2.5 times as long on two
    cores. ``torch.set_num_threads`` would not do: it also sets what other threads use.
    """
    torch.get_num_threads()  # sets this thread's default, which would replace ours later
    for path in _openmp_libraries():
        ctypes.CDLL(path).omp_set_num_threads(1)


def _openmp_libraries() -> set[str]:
    """OpenMP runtimes that this process has loaded; empty where that cannot be told."""
    try:
        lines = _LOADED.read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return {path for path in paths if _OPENMP.search(path)}
