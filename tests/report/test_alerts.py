"""Alerts reach real commands and a real server, or say in one line why not."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.diagnose.finding import Finding
from routeprof.errors import UsageError
from routeprof.report.alerts import (
    WAITING,
    Command,
    Delivery,
    NotTakenError,
    Webhook,
    command,
    payload,
    webhook,
)
from tests.diagnose.made import EXPERTS, record, steady

HOSTILE = "a\n\x1b[31m$(touch owned) `x` \ud800 ü"


class Server:
    """Answers every POST with a status; keeps what it got."""

    def __init__(self, status: int, location: str | None) -> None:
        self.got: list[tuple[str, str | None, bytes]] = []
        self.hold = threading.Event()
        self.hold.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.got.append((self.path, self.headers["Content-Type"], body))
                outer.hold.wait(120)
                self.send_response(status)
                if location is not None:
                    self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serving(status: int = 200, location: str | None = None) -> Iterator[Server]:
    made = Server(status, location)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        made.hold.set()
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def python(code: str) -> Command:
    return Command((sys.executable, "-c", code))


def test_the_json_has_what_the_finding_has(tmp_path: Path):
    profile = routeprof.load(record(tmp_path / "run", steady(np.ones(EXPERTS))))
    figures = {"whole": np.int64(3), "ratio": np.float64(1.5), "unknown": float("nan")}
    found = Finding("hot-experts", "warning", HOSTILE, "do", (1, 2), "decode", figures)
    data = json.loads(payload(found, profile, ["runs/ü"], 12.5))
    assert data.pop("text").startswith("routeprof: warning: hot-experts: a�")
    assert data.pop("evidence") == HOSTILE.replace("\ud800", "?")
    assert data == {
        "event": "finding",
        "time": 12.5,
        "recordings": ["runs/ü"],
        "model": "made",
        "code": "hot-experts",
        "severity": "warning",
        "suggestion": "do",
        "layers": [1, 2],
        "phase": "decode",
        "figures": {"whole": 3, "ratio": 1.5, "unknown": None},
    }


def test_a_command_gets_it_on_its_input(tmp_path: Path):
    file = tmp_path / "got"
    python(f"import sys; open({str(file)!r}, 'wb').write(sys.stdin.buffer.read())")(b'{"a": 1}')
    assert file.read_bytes() == b'{"a": 1}'


def test_a_command_that_reads_nothing_is_fine():
    Command(("true",))(b"x" * 1_000_000)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (
            python("import sys; print('x\\n no\\x1b way', file=sys.stderr); sys.exit(3)"),
            "3: no� way",
        ),
        (Command(("false",)), "exit status 1"),
        (Command(("/nowhere/at/all",)), "No such file"),
        (Command((sys.executable, "-c", "import time; time.sleep(99)"), 0.2), "more than 0.2 s"),
    ],
)
def test_a_command_that_fails_says_why_in_one_line(failing: Command, said: str):
    with pytest.raises(NotTakenError) as error:
        failing(b"{}")
    assert said in str(error.value)
    assert str(error.value).isprintable()


def test_a_webhook_gets_a_post():
    with serving() as server:
        Webhook(f"{server.url}/hook?x=1")(b'{"a": 1}')
        assert server.got == [("/hook?x=1", "application/json", b'{"a": 1}')]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_leads_nowhere(status: int):
    with serving() as other, serving(status, f"{other.url}/stolen") as server:
        with pytest.raises(NotTakenError, match=f"status {status}, a redirect"):
            Webhook(server.url)(b"{}")
        assert len(server.got) == 1
        assert other.got == []


def test_a_webhook_that_does_not_take_it():
    with serving(503) as server, pytest.raises(NotTakenError, match="status 503"):
        Webhook(server.url)(b"{}")
    with pytest.raises(NotTakenError, match="refused"):
        Webhook(server.url)(b"{}")
    with serving() as slow:
        slow.hold.clear()
        with pytest.raises(NotTakenError, match=r"after at most 0.2 s|timed out"):
            Webhook(slow.url, 0.2)(b"{}")


def test_what_is_on_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving() as server:
        Webhook(server.url)(b"{}")
        assert len(server.got) == 1


def test_a_name_tells_no_secret():
    hook = webhook("https://hooks.example.com:8443/services/SECRET?token=SECRET")
    assert hook.name == "https://hooks.example.com:8443"


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://host/x", "file:///etc/passwd", "http://", "host/x", "http://a:b@host/"),
        *("http://h:x/", "http://host/a b", "http://host/\r\nX: y", "http://hüst/", "http://[::1/"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str):
    with pytest.raises(UsageError, match="--webhook"):
        webhook(url)


@pytest.mark.parametrize("text", ["", "  ", "no-such-program-here", "'open"])
def test_a_command_that_cannot_be_is_refused(text: str):
    with pytest.raises(UsageError, match="--on-finding"):
        command(text)


def test_words_are_those_of_a_shell_and_no_shell_reads_them(tmp_path: Path):
    made = command(f"touch '{tmp_path}/a b' {tmp_path}/$HOME;x")
    made(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["$HOME;x", "a b"]


def finding(code: str) -> Finding:
    return Finding(code, "warning", "", "")


def test_delivery_goes_on_after_failures_and_says_them_in_one_line():
    lines: list[str] = []
    failed: list[str] = []
    with serving(500) as server:
        delivery = Delivery(
            [Webhook(server.url)], lines.append, lambda one: failed.append(one.code)
        )
        for code in "ab":
            delivery.send(finding(code), b"{}")
        delivery.close(120)
    assert failed == ["a", "b"]
    assert lines == [f"alert {code}: {server.url}: status 500" for code in "ab"]


def test_one_receiver_that_takes_it_is_enough():
    failed: list[Finding] = []
    lines: list[str] = []
    with serving() as server:
        delivery = Delivery([Command(("false",)), Webhook(server.url)], lines.append, failed.append)
        delivery.send(finding("a"), b"{}")
        delivery.close(120)
        assert len(server.got) == 1
    assert failed == []
    assert len(lines) == 1


def test_a_receiver_that_hangs_holds_nobody_up():
    """As many as may wait are kept, the rest is given up; sending itself never waits."""
    failed: list[Finding] = []
    lines: list[str] = []
    with serving() as server:
        server.hold.clear()
        delivery = Delivery([Webhook(server.url, 120)], lines.append, failed.append)
        for number in range(WAITING + 5):
            delivery.send(finding(str(number)), b"{}")
        assert len(failed) in (4, 5)  # one may be under way
        assert all("given up" in line for line in lines)
        server.hold.set()
        delivery.close(120)
        assert len(server.got) == WAITING + 5 - len(failed)
