from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import routeprof
from routeprof.dashboards import create_app
from routeprof.dashboards.serve import address, make_server, serve
from routeprof.errors import UsageError
from routeprof.report.csv import available, csv_text
from tests.dashboards.made import HOSTILE, LONG

TOKEN = "correct horse"


@pytest.fixture
def app(recorded: Path) -> Any:
    return create_app(recorded)


def client_of(app: Any, **options: Any) -> Any:
    make_server(app, port=0, **options).close()
    return app.server.test_client()


# -- who may see it


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", ""])
def test_another_host_needs_a_token(app: Any, host: str) -> None:
    with pytest.raises(UsageError, match="--auth-token"):
        make_server(app, host, 0)


def test_insecure_is_a_choice(app: Any) -> None:
    server = make_server(app, "0.0.0.0", 0, insecure=True)
    assert address(server, "0.0.0.0") == f"http://127.0.0.1:{server.effective_port}/"
    server.close()
    assert app.server.test_client().get("/", headers={"Host": "10.0.0.5"}).status_code == 200


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_none(app: Any, token: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        make_server(app, "0.0.0.0", 0, auth_token=token)


PATHS = ["/", "/heatmap", "/csv/layers.csv", "/_dash-layout", "/nonsense"]


@pytest.mark.parametrize("path", PATHS)
def test_every_request_needs_the_token(app: Any, path: str) -> None:
    client = client_of(app, auth_token=TOKEN)
    refused = client.get(path)
    assert refused.status_code == 401
    assert TOKEN not in refused.text
    assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(f"{path}?token=wrong").status_code == 401
    allowed = client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert allowed.status_code == 200


def test_callbacks_need_the_token(app: Any) -> None:
    client = client_of(app, auth_token=TOKEN)
    assert client.post("/_dash-update-component", json={}).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(app: Any) -> None:
    client = client_of(app, auth_token=TOKEN)
    answer = client.get(f"/heatmap?phase=decode&token={quote(TOKEN)}")
    assert answer.status_code == 302
    assert answer.headers["Location"] == "/heatmap?phase=decode"
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert TOKEN not in cookie
    assert client.get("/heatmap").status_code == 200


def test_the_redirect_stays_here(app: Any) -> None:
    client = client_of(app, auth_token=TOKEN)
    answer = client.get(f"//evil.example/?token={quote(TOKEN)}")
    assert answer.headers.get("Location", "/").startswith("/")
    assert not answer.headers.get("Location", "/").startswith("//")


def test_health_needs_no_token_and_tells_nothing(app: Any) -> None:
    answer = client_of(app, auth_token=TOKEN).get("/healthz")
    assert (answer.status_code, answer.text) == (200, "OK")


def test_a_foreign_name_is_refused(app: Any) -> None:
    client = client_of(app)
    assert client.get("/", headers={"Host": "rebound.example:8050"}).status_code == 403
    for host in ("127.0.0.1:8050", "localhost:1", "[::1]:8050"):
        assert client.get("/", headers={"Host": host}).status_code == 200


def test_headers_keep_the_page_to_itself(app: Any) -> None:
    policy = client_of(app).get("/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy


def test_a_port_in_use_is_said_in_one_line(app: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^port {port} is in use; .*--port$"):
            serve(app, port=port)


# -- what it hands out


def test_downloads_are_the_reports_bytes(app: Any, recorded: Path) -> None:
    client, profile = client_of(app), routeprof.load(recorded)
    for name in available(profile):
        answer = client.get(f"/csv/{name}.csv")
        assert answer.data == csv_text(profile, name).encode()
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{name}.csv"'


@pytest.mark.parametrize("tag", ["code", HOSTILE, LONG, "untagged"])
def test_downloads_follow_the_selection(app: Any, recorded: Path, tag: str) -> None:
    answer = client_of(app).get("/csv/experts.csv", query_string={"phase": "decode", "tag": tag})
    profile = routeprof.load(recorded).select(phase="decode", tag=tag)
    assert answer.data == csv_text(profile, "experts").encode()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/csv/nonsense.csv", 404),
        ("/csv/steps.csv", 404),  # the recording has no steps
        ("/csv/..%2f..%2fetc%2fpasswd.csv", 200),  # the page, which knows no such view
        ("/csv/layers.csv?phase=nonsense", 400),
        ("/csv/layers.csv?path=/etc/passwd", 400),
        ("/csv/layers.csv?tag=%ff%fe", 400),
    ],
)
def test_the_address_names_no_file(app: Any, path: str, status: int) -> None:
    answer = client_of(app).get(path)
    assert answer.status_code == status
    assert "Traceback" not in answer.text
    assert "root:" not in answer.text


def test_nothing_is_fetched_from_elsewhere(app: Any) -> None:
    page = client_of(app).get("/").text
    assert "https://" not in page
    assert "//cdn" not in page


def test_apps_do_not_share_anything(recorded: Path, tmp_path: Path) -> None:
    one, other = create_app(recorded), create_app(tmp_path / "nothing", title="Other")
    assert client_of(one).get("/csv/layers.csv").status_code == 200
    assert client_of(other).get("/csv/layers.csv").status_code == 404
    assert "<title>nothing · Other</title>" in other.server.test_client().get("/").text


def test_importing_the_package_imports_no_dash() -> None:
    code = "import sys, routeprof.dashboards; sys.exit('dash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
