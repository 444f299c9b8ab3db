"""A real Dask scheduler and workers, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Address of the scheduler, and the processes of the workers and last of the scheduler.

    They run in another directory.
    """
    folder.mkdir()
    file, elsewhere = folder / "scheduler.json", folder / "elsewhere"
    elsewhere.mkdir()
    quiet = ["--no-dashboard", f"--scheduler-file={file}"]
    with ExitStack() as stack:
        local = ["--host=127.0.0.1", "--port=0"]
        scheduler = _started(
            stack, folder / "scheduler.log", elsewhere, "dask_scheduler", *quiet, *local
        )
        plain = ["--nthreads=1", "--no-nanny", f"--local-directory={elsewhere}"]
        processes = [
            _started(stack, folder / f"worker-{n}.log", elsewhere, "dask_worker", *quiet, *plain)
            for n in range(workers)
        ]
        with Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            address = client.scheduler.address
        yield address, [*processes, scheduler]


def _started(
    stack: ExitStack, log: Path, folder: Path, module: str, *arguments: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env=environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process
