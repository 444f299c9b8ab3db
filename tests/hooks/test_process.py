"""Attaching by process id: the parts that need no debugger. Real ones: tests/commands/test_attach.

What runs inside the target has a process of its own in each test, because it looks at everything
that lives there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from routeprof.errors import AttachError
from routeprof.hooks import process
from routeprof.hooks.proc import (
    FUNCTIONS,
    ROOM,
    free_address,
    functions,
    maps,
    python_version,
    read_elf,
)
from tests.commands.watching import BUSY, Spoken

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")

PRELUDE = """
import gc, json, os, socket, sys, threading
from pathlib import Path
import numpy as np
import torch
from torch import nn
import routeprof
from routeprof.errors import AttachError
from routeprof.hooks import inside, process
from tests.hooks.conftest import hooks_left, model_of
from tests.zoo.families import BY_TYPE, inputs, quiet

# As sys.remote_exec of Python 3.14 does it, in this very process: a stand-in for the real one.
def remote_exec(pid, script):
    assert Path(script).stat().st_mode & 0o077 == 0
    exec(Path(script).read_text(), {})
sys.remote_exec = remote_exec

def attach(out, **options):
    settings = process.AttachSettings(str(Path(out).absolute()), window=3600.0, **options)
    return process.attach(os.getpid(), settings, method="remote_exec")

def stop(out):
    from routeprof.capture.control import request, wait_for
    wait_for(Path(out), request(Path(out), "stopped"), 60)

def run(model):
    with quiet(), torch.no_grad():
        model(**inputs(BY_TYPE["mixtral"]))

def steps(out):
    return routeprof.load(out).layers()["steps"].tolist()
"""


def inside(folder: Path, code: str) -> None:
    """Run the code in a process of its own, in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_all_outermost_models_are_recorded(tmp_path: Path):
    code = """
class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, **words):
        return self.inner(**words)

first, second = Wrapper(model_of("mixtral")), model_of("mixtral")
plan = model_of("mixtral").to("meta")
dense = nn.Sequential(nn.Linear(2, 2))
attached = attach("out")
assert sorted(path.name for path in attached.directories) == ["out", "out.2"]
assert sorted(name for name, _ in attached.models) == ["MixtralForCausalLM", "Wrapper"]
assert {layers for _, layers in attached.models} == {4}
assert not hooks_left(plan) and not hooks_left(dense)
for model in (first, first, second):
    run(model)
for path in attached.directories:
    stop(path)
assert not hooks_left(first) and not hooks_left(second)
seen = {routeprof.load(path).info.model.name: steps(path) for path in attached.directories}
assert seen == {"Wrapper": [2] * 4, "MixtralForCausalLM": [1] * 4}, seen
"""
    inside(tmp_path, code)


def test_a_pass_that_runs_is_not_half_counted(tmp_path: Path):
    """Neither at the attach nor at the detach, wherever in the model it is."""
    code = """
model = model_of("mixtral")
blocks = list(model.model.layers)
arrived, go_on = threading.Semaphore(0), threading.Semaphore(0)
def wait(module, args, output):
    arrived.release()
    assert go_on.acquire(timeout=60)
handle = blocks[1].register_forward_hook(wait)

def passes(count):
    for _ in range(count):
        run(model)
worker = threading.Thread(target=passes, args=(3,))
worker.start()
assert arrived.acquire(timeout=60)        # in the middle of the first pass
attach("out", level="steps")
go_on.release()
assert arrived.acquire(timeout=60)        # in the middle of the second
from routeprof.capture.control import request, wait_for
number = request(Path("out"), "stopped")
import time
late = time.monotonic() + 60
recorder = next(o for o in gc.get_objects() if type(o).__name__ == "Recorder")
while recorder.streams[0].capture.enabled:
    assert time.monotonic() < late
go_on.release()
assert arrived.acquire(timeout=60)        # and of the third
wait_for(Path("out"), number, 60)
go_on.release()
worker.join()
handle.remove()
assert not hooks_left(model)
profile = routeprof.load("out")
assert profile.layers()["steps"].tolist() == [1] * 4
assert profile.coverage == 1.0 and profile.phases == ("prefill",), profile.phases
assert recorder.problems == {}
"""
    inside(tmp_path, code)


def test_what_the_client_did_not_hear_of_is_undone(tmp_path: Path):
    code = """
model = model_of("mixtral")
server = socket.create_server(("127.0.0.1", 0))
exec(process.statement(server.getsockname()[1], "token"), {})
channel, _ = server.accept()
assert json.loads(process._line(channel)) == {"token": "token"}
settings = {"out": "out", "level": "windows", "gate": True, "window": 3600.0, "duration": None}
channel.sendall(json.dumps(settings).encode() + b"\\n")
assert "directories" in json.loads(process._line(channel))
assert hooks_left(model)
channel.close()
from routeprof.capture.control import rank_states
import time
late = time.monotonic() + 60
while rank_states(Path("out"))[0].state != "stopped":
    assert time.monotonic() < late
assert not hooks_left(model)
"""
    inside(tmp_path, code)


def test_who_does_not_know_the_token_is_not_listened_to(tmp_path: Path):
    code = """
model = model_of("mixtral")
inject = process.inject
def with_strangers(pid, source, method, folder):
    import base64, re
    packed = re.search("b64decode[(]'(.*)'[)]", source)[1]
    port = int(re.search(r'127.0.0.1", (\\d+)', base64.b64decode(packed).decode())[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    for stranger, said in zip(strangers, (b'{"token": "x"}\\n', b"[]\\n", b"\\xff\\n", b"")):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
    inject(pid, source, method, folder)
process.inject = with_strangers
assert attach("out").models == (("MixtralForCausalLM", 4),)
run(model)
stop("out")
assert steps("out") == [1] * 4
"""
    inside(tmp_path, code)


def test_models_that_are_out_of_the_garbage_collectors_sight(tmp_path: Path):
    code = """
model = model_of("mixtral")
gc.collect()
gc.freeze()
frozen = gc.get_freeze_count()
attach("out")
assert gc.get_freeze_count() >= frozen
run(model)
stop("out")
assert steps("out") == [1] * 4
"""
    inside(tmp_path, code)


def test_what_is_refused(tmp_path: Path):
    code = """
def refused(expected):
    try:
        attach("out")
    except AttachError as error:
        assert expected in str(error), error
        assert f"process {os.getpid()}" in str(error)
    else:
        raise AssertionError(expected)
    assert not Path("out").exists()

refused("no model with MoE layers")
model = model_of("mixtral")
real = torch.cuda.CUDAGraph
class Graph:  # a stand-in: real ones need a GPU
    pass
torch.cuda.CUDAGraph, graph = Graph, Graph()
refused("replays CUDA graphs, in which hooks do not run; start it again under routeprof run")
torch.cuda.CUDAGraph = real
with routeprof.record(model, "mine"):
    refused("is being recorded already")
type(model.model.norm).__module__ = "vllm.layers"
sys.modules["vllm"] = torch
refused("it runs vllm")
type(model.model.norm).__module__ = "transformers"
del sys.modules["vllm"]
compiled = torch.compile(model, backend="eager")
refused("is compiled, and hooks do not run in compiled code; start it again")
del compiled
model.compile(backend="eager")
refused("is compiled")
model._compiled_call_impl = None
sys.modules["routeprof.hooks.inside"] = None
refused("-m pip install routeprof")
assert not hooks_left(model)
"""
    inside(tmp_path, code)


# -- looking at a process from outside


@linux
def test_addresses_of_functions():
    """The dynamic linker of this process knows better."""
    found = functions(os.getpid())
    assert set(found) == set(FUNCTIONS)
    for name, address in found.items():
        library = ctypes.CDLL(None) if name == "mmap" else ctypes.pythonapi
        assert ctypes.cast(getattr(library, name), ctypes.c_void_p).value == address


def test_files_that_are_no_programs():
    for data in (b"", b"\x7fELF\x01\x01" + bytes(100), b"#!/bin/sh\n", b"\x7fELF"):
        with pytest.raises(ValueError, match="ELF"):
            read_elf(data, FUNCTIONS)


@linux
def test_room_in_a_process():
    pid = os.getpid()
    for _ in range(20):
        address = free_address(pid)
        for line in maps(pid).splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            assert end <= address or address + ROOM <= start


@linux
def test_which_python_a_process_runs():
    assert python_version(os.getpid()) == sys.version_info[:2]
    with subprocess.Popen(["sleep", "100"]) as other:
        assert python_version(other.pid) is None
        with pytest.raises(AttachError, match=r"has no (mmap|Py)"):
            functions(other.pid)
        other.kill()


def test_a_statement_needs_no_quoting():
    text = process.statement(12345, "token")
    assert text.isascii()
    assert text.isprintable()
    assert '"' not in text
    assert "\\" not in text
    # It cannot fail, nor leave a name behind, whatever becomes of the connection.
    names: dict[str, object] = {}
    exec(text, names)
    assert names.keys() == {"__builtins__"}


@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="needs unshare")
@pytest.mark.parametrize("kind", ["--net", "--mount"])
def test_a_process_in_a_container(kind: str):
    with Spoken(["unshare", kind, sys.executable, "-c", BUSY]) as other:
        with pytest.raises(AttachError, match="runs in a container; run routeprof attach inside"):
            process.attach(other.pid, process.AttachSettings("/tmp/out"))
        assert other.poll() is None
