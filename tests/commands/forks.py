"""The command line in forks of an interpreter that has imported what is heavy.

A command that reads a recording spends nearly all of its time on imports, and the tests call
hundreds. This file, run as a program, imports everything once; then it forks for each line on
stdin, and the fork becomes ``python -m routeprof``: arguments, folder and streams of its own, its
exit status that of the interpreter. ``test_forks.py`` compares forks with processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

HEAVY = ("matplotlib.backends.backend_agg", "pandas", "pyarrow.parquet", "rich.console", "torch")
PACKAGES = ("commands", "diagnose", "formats", "metrics", "plan", "recording", "report", "whatif")
"""Of routeprof, what is imported beforehand, with all that it imports at its top."""

Done = subprocess.CompletedProcess[str]


class Forks:
    """An interpreter that forks; those of one pytest process share it."""

    def __init__(self) -> None:
        self.environment = FIRST
        self._streams = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=self.environment | {"OMP_NUM_THREADS": "1"},  # no threads, which no fork has
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], folder: Path) -> Done:
        """Run ``routeprof`` with these arguments in a folder, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, error = (Path(self._streams.name, name) for name in ("out", "error"))
        call = {
            "arguments": arguments,
            "folder": str(folder),
            "streams": [os.devnull, str(out), str(error)],
        }
        try:
            print(json.dumps(call), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
        except BaseException:  # no later call may read the answer to this one
            self.end()
            raise
        return subprocess.CompletedProcess(arguments, status, out.read_text(), error.read_text())

    def end(self) -> None:
        forks.cache_clear()
        atexit.unregister(self.end)
        self._process.kill()
        self._process.communicate()
        self._streams.cleanup()


@functools.cache
def forks() -> Forks:
    """The interpreter that forks, started when it is first asked for."""
    started = Forks()
    atexit.register(started.end)
    return started


def environment() -> dict[str, str]:
    """Environment variables, but for the one that pytest changes with each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


FIRST = environment()
"""Those before any test changed them."""


# -- in the interpreter that forks


def _serve() -> None:
    """Fork for each line."""
    del sys.path[0]  # the folder of this file; a command has its own there
    for name in HEAVY:
        importlib.import_module(name)
    for package in PACKAGES:
        found = importlib.import_module(f"routeprof.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)
    # A fork has one thread. The allocator in pyarrow has one that it starts again by itself.
    threads = [file.read_text() for file in Path("/proc/self/task").glob("[0-9]*/comm")]
    assert len([name for name in threads if name != "jemalloc_bg_thd\n"]) == 1, threads
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


def _become(arguments: list[str], folder: str, streams: list[str]) -> NoReturn:
    """Turn this fork into the command, and end as it does.

    An interpreter that ends takes all its modules apart, which here would take longer than most
    commands: it is left after what a command could notice.
    """
    os.chdir(folder)
    for number, stream in enumerate(streams):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        opened = os.open(stream, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.path.insert(0, folder)
    sys.argv[1:] = arguments
    status: object = 1
    try:
        runpy.run_module("routeprof", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    _serve()
