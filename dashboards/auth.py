"""Who may see the page: everybody on this machine, or whoever knows the token."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any
from urllib.parse import urlencode, urlsplit

from flask import Flask, Response, redirect, request

HEALTH = "healthz"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def require_token(server: Flask, token: str) -> None:
    """Let only requests through that carry the token.

    As ``Authorization: Bearer``, or once as ``?token=``, which is then kept in a cookie and
    taken out of the address.
    """
    proof = hmac.new(token.encode(), b"routeprof dashboard", hashlib.sha256).hexdigest()
    # Two dashboards on one host share their cookies: each has a name of its own.
    cookie = f"routeprof_{proof[:8]}"

    def guard() -> Any:
        if request.path == f"/{HEALTH}":
            return None
        if _same(request.args.get("token"), token):
            answer = redirect(_without_token(request.full_path))
            answer.set_cookie(cookie, proof, httponly=True, samesite="Lax")
            return answer
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(cookie), proof) or _same(bearer, token):
            return None
        return _refuse(401, "This dashboard needs its token: add ?token=… to the address once.")

    server.before_request(guard)


def require_local_name(server: Flask) -> None:
    """Refuse other host names: a web page must not reach us through a name that it controls."""

    def guard() -> Any:
        name = urlsplit(f"//{request.host}").hostname
        if name in LOOPBACK:
            return None
        return _refuse(
            403, "Open this dashboard as http://127.0.0.1 or start it with --auth-token."
        )

    server.before_request(guard)


def add_headers(server: Flask) -> None:
    """Tell the browser that the page needs nothing from elsewhere."""
    policy = (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "worker-src 'self' blob:; frame-ancestors 'self'; form-action 'none'; base-uri 'self'"
    )

    def headers(response: Response) -> Response:
        response.headers.setdefault("Content-Security-Policy", policy)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("Referrer-Policy", "same-origin")
        return response

    server.after_request(headers)


def _same(given: str | None, expected: str) -> bool:
    return hmac.compare_digest((given or "").encode(), expected.encode())


def _without_token(path: str) -> str:
    parts = urlsplit(path)
    rest = [(name, value) for name, value in request.args.items(multi=True) if name != "token"]
    # One slash: "//host" would be another site.
    return "/" + parts.path.lstrip("/") + (f"?{urlencode(rest)}" if rest else "")


def _refuse(status: int, text: str) -> Response:
    return Response(f"{text}\n", status, mimetype="text/plain")
