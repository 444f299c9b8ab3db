"""Serving the dashboard by waitress, to this machine alone unless told otherwise."""

from __future__ import annotations

import errno
import logging
import socket
import webbrowser
from typing import Any
from urllib.parse import urlencode

import waitress
from dash import Dash

from routeprof.dashboards.auth import LOOPBACK, require_local_name, require_token
from routeprof.errors import UsageError

HOST, PORT = "127.0.0.1", 8050
THREADS = 8


def make_server(
    app: Dash,
    host: str = HOST,
    port: int = PORT,
    *,
    auth_token: str | None = None,
    insecure: bool = False,
) -> Any:
    """A waitress server that listens already; ``run`` serves until it is interrupted.

    Args:
        host: an address other than this machine's own needs a token, or ``insecure``.
        port: 0 takes a free one; ``effective_port`` of the result says which.
        auth_token: what every request must carry.
        insecure: serve other machines without a token.

    Raises:
        UsageError: the host is open to others, the token is empty, or the port is taken.
    """
    if auth_token is not None and not auth_token.strip():
        raise UsageError("the token is empty; give --auth-token some text")
    if host not in LOOPBACK and auth_token is None and not insecure:
        raise UsageError(
            f"host {host} shows the recording to other machines; add --auth-token, or --insecure"
        )
    if auth_token is not None:
        require_token(app.server, auth_token)
    elif not insecure:
        require_local_name(app.server)
    # The queue's depth is of no interest to the reader of a profile.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    # A loop that looks up every second: a closed server ends soon.
    return waitress.create_server(
        app.server,
        sockets=[_listen(host, port)],
        threads=THREADS,
        ident="routeprof",
        asyncore_loop_timeout=1,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(_reason(error, host, port)) from error


def serve(
    app: Dash,
    host: str = HOST,
    port: int = PORT,
    *,
    auth_token: str | None = None,
    insecure: bool = False,
    open_browser: bool = False,
) -> None:
    """Serve until interrupted, having said where; raises what ``make_server`` raises."""
    server = make_server(app, host, port, auth_token=auth_token, insecure=insecure)
    url = address(server, host)
    print(f"Dashboard at {url} (Ctrl+C stops it)", flush=True)
    if open_browser:
        webbrowser.open(url if auth_token is None else f"{url}?{urlencode({'token': auth_token})}")
    try:
        server.run()
    finally:
        server.close()


def address(server: Any, host: str) -> str:
    """Where a browser on this machine finds the server."""
    name = f"[{host}]" if ":" in host else host
    shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(name, name)
    return f"http://{shown}:{server.effective_port}/"


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be opened by this user; choose one above 1023 with --port"
    return f"cannot listen on {host}:{port} ({error.strerror or error}); check --host and --port"
