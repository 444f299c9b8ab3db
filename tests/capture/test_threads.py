"""The drain thread leaves the engine its cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")

PROGRAM = """
import threading
from pathlib import Path
import torch
from routeprof.capture.threads import stay_single

torch.set_num_threads(2)
big = torch.ones(2_000_000)

def threads():
    return set(Path("/proc/self/task").iterdir())

def pool():
    before = threads()
    big.add(1)
    return len(threads() - before)

def on_a_thread(prepare):
    def run():
        prepare()
        print(pool())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

pool()  # this thread's own
on_a_thread(stay_single)
on_a_thread(lambda: None)
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads through /proc")
def test_operators_of_a_single_thread_start_no_pool():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    single, ordinary, engine = map(int, done.stdout.split())
    assert ordinary == 1  # what happens without
    assert single == 0
    assert engine == 2
