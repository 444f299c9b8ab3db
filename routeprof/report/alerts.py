"""Findings for programs that wake somebody up: a command's input, or a request to a URL."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPMessage
from ipaddress import ip_address
from queue import Full, Queue
from threading import Thread
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from routeprof.errors import UsageError
from routeprof.report.diagnose import finding_line
from routeprof.report.summary import json_data, plain

if TYPE_CHECKING:
    from routeprof.diagnose.finding import Finding
    from routeprof.profile import Profile

COMMAND_SECONDS = 30.0
"""A command that takes longer is killed, with what it started."""

REQUEST_SECONDS = 10.0
WAITING = 64
"""Alerts that may wait for a slow receiver; more are given up, and that is said."""


def payload(finding: Finding, profile: Profile, names: Sequence[str], moment: float) -> bytes:
    """One finding as JSON, UTF-8.

    Args:
        names: of the recordings.
        moment: seconds since the epoch.
    """
    facts = {
        "event": "finding",
        "time": moment,
        "recordings": [*names],
        "model": profile.info.model.name,
        "text": f"routeprof: {finding_line(finding)}",
        **{name: value for name, value in asdict(finding).items() if name != "gain"},
    }
    return json.dumps(json_data(facts), ensure_ascii=False).encode(errors="replace")


# -- receivers


class NotTakenError(Exception):
    """An alert was not taken; the message says why, without what may be secret in a URL."""


@dataclass(frozen=True)
class Command:
    """Gets the JSON on its standard input; no shell reads it, and no text of it is an argument."""

    words: tuple[str, ...]
    seconds: float = COMMAND_SECONDS

    @property
    def name(self) -> str:
        """For messages."""
        return self.words[0]

    def __call__(self, body: bytes) -> None:
        """Run it.

        Raises:
            NotTakenError: it cannot be run, failed, or took too long.
        """
        try:
            process = subprocess.Popen(
                self.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise NotTakenError(error.strerror or str(error)) from None
        try:
            _, said = process.communicate(body, timeout=self.seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it ended just now
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NotTakenError(f"took more than {self.seconds:g} s and was killed") from None
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            why = f": {plain(lines[-1].strip())}" if lines else ""
            raise NotTakenError(f"exit status {process.returncode}{why}")


@dataclass(frozen=True)
class Webhook:
    """Gets the JSON by POST; redirects are not followed."""

    url: str
    seconds: float = REQUEST_SECONDS

    @property
    def name(self) -> str:
        """For messages: without the path, which is the secret of many services."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}"

    def __call__(self, body: bytes) -> None:
        """Send it.

        Raises:
            NotTakenError: nobody answers, or not with success.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "routeprof"}
        request = urllib.request.Request(self.url, body, headers, method="POST")
        try:
            with _opener(self.url).open(request, timeout=self.seconds) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            moved = ", a redirect: name the URL that it leads to" if error.code // 100 == 3 else ""
            raise NotTakenError(f"status {error.code}{moved}") from None
        except urllib.error.URLError as error:
            raise NotTakenError(
                f"{getattr(error.reason, 'strerror', None) or error.reason}"
            ) from None
        except (OSError, HTTPException) as error:
            raise NotTakenError(
                f"{type(error).__name__} after at most {self.seconds:g} s"
            ) from None


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the answer is the error that it is then."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """With the proxy of the environment, but not for this machine."""
    direct = [urllib.request.ProxyHandler({})] if _is_here(urlsplit(url).hostname) else []
    return urllib.request.build_opener(_Stay, *direct)


def _is_here(host: str | None) -> bool:
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def command(text: str) -> Command:
    """The command of an option.

    Raises:
        UsageError: no words, or no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--on-finding {text!r}: {error}; quote it as a shell does") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise UsageError(f"--on-finding {text!r} names no program; pass one that can be run")
    return Command((program, *words[1:]))


def webhook(url: str) -> Webhook:
    """The receiver of an option.

    Raises:
        UsageError: not a URL that can be posted to.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise UsageError("--webhook needs an http:// or https:// URL with a host")
    if parts.username is not None or " " in url or not url.isascii():
        raise UsageError("--webhook takes no user in its URL and no space; put a token in its path")
    return Webhook(url)


# -- delivery


Receiver = Command | Webhook


class Delivery:
    """Hands alerts to receivers on a thread of its own: whoever watches never waits.

    Args:
        say: takes one line for each alert that was not taken; called on that thread.
        failed: is told which finding no receiver took.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        say: Callable[[str], None],
        failed: Callable[[Finding], None],
    ) -> None:
        self._receivers, self._say, self._failed = receivers, say, failed
        self._queue: Queue[tuple[Finding, bytes] | None] = Queue(WAITING)
        self._thread = Thread(target=self._run, name="routeprof-alerts", daemon=True)
        self._thread.start()

    def send(self, finding: Finding, body: bytes) -> None:
        """Queue an alert; never waits."""
        try:
            self._queue.put_nowait((finding, body))
        except Full:
            self._failed(finding)
            self._say(f"alert {finding.code} given up: {WAITING} others are waiting")

    def close(self, seconds: float) -> None:
        """Hand over what is queued, for so long at most."""
        try:
            self._queue.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            finding, body = item
            taken = [self._hand(receiver, finding, body) for receiver in self._receivers]
            if taken and not any(taken):
                self._failed(finding)

    def _hand(self, receiver: Receiver, finding: Finding, body: bytes) -> bool:
        try:
            receiver(body)
        except NotTakenError as error:
            self._say(f"alert {finding.code}: {receiver.name}: {error}")
        except Exception as error:  # one alert must not end all alerts
            self._say(f"alert {finding.code}: {receiver.name}: {type(error).__name__}")
        else:
            return True
        return False
