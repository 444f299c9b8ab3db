"""The faults of ``shim.c``, set from inside the process that preloads it."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULTS = (
    "clock_seconds rename_milliseconds rename_error rename_lost link_error create_error "
    "list_error hide_seconds"
).split()
SOURCE = Path(__file__).with_name("shim.c")
CONTROL, UNDER = "ROUTEPROF_SHIM", "ROUTEPROF_SHIM_UNDER"


def compiled(folder: Path) -> Path | str:
    """The library; or why there is none."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return "needs Linux and a C compiler"
    library = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"the shim cannot be compiled: {done.stderr}" if done.returncode else library


def environment(library: Path, under: Path) -> dict[str, str]:
    """What a process is to be started with to have faults at all paths under a folder."""
    control = library.with_name(f"{under.name}.faults")
    control.write_bytes(bytes(8 * len(FAULTS)))
    own = {"LD_PRELOAD": str(library), CONTROL: str(control), UNDER: str(under)}
    return os.environ | own


class Faults:
    """Sets and reads the faults of this process."""

    def __init__(self) -> None:
        with Path(os.environ[CONTROL]).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(FAULTS))

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("q", self._map, 8 * FAULTS.index(name))[0]

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._map, 8 * FAULTS.index(name), value)

    @contextmanager
    def having(self, **faults: int) -> Iterator[None]:
        """These faults while the block runs, and none after it."""
        for name, value in faults.items():
            self[name] = value
        yield
        for name in faults:
            self[name] = 0
