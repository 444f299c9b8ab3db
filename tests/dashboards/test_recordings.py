"""Every view in both schemes, in a real browser, on recordings of every kind and size."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

import routeprof
from routeprof.dashboards import callbacks
from routeprof.dashboards.drawing import draw
from routeprof.dashboards.shell import TICK_MS
from routeprof.dashboards.views import VIEWS
from routeprof.report.csv import available, csv_text
from tests.dashboards.made import Writer
from tests.dashboards.synthetic import Shape, write
from tests.dashboards.test_browser import PATIENCE, browser, drawn, open_page, serve, window

__all__ = ["browser", "open_page", "serve", "window"]

pytestmark = pytest.mark.browser

SHAPES = {
    "long": Shape(layers=61, experts=256, windows=10_000, windows_per_part=100),
    "wide": Shape(layers=94, experts=512, windows=6, gate=True),
    "silent": Shape(layers=12, experts=32, windows=20, silent=frozenset({3, 4, 9})),
}
"""Made-up recordings: as many windows as three hours have, many experts, lost layers."""

SHOWN = [view for view in VIEWS if "against" not in view.controls]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def sample() -> Path:
    return Path(routeprof.__file__).parent / "sample_data" / "recordings" / "healthy"


@pytest.fixture(scope="module", params=["sample", *SHAPES])
def kind(request: pytest.FixtureRequest, folder: Path, sample: Path) -> Path:
    """A finished recording."""
    if request.param == "sample":
        return sample
    path = folder / request.param
    if not path.exists():
        write(path, SHAPES[request.param])
    return path


def visit(page: Any, url: str, schemes: tuple[str, ...] = ("light", "dark")) -> None:
    """Every view, by its link; nothing is wider than the window, and no figure is missing."""
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{url}/overview")
        for view in SHOWN:
            page.get_by_role("link", name=view.title, exact=True).click()
            page.get_by_role("heading", name=view.title, exact=True).wait_for()
            drawn(page, len(view.panels))
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.get_by_text("could not be drawn").count() == 0


def test_finished(open_page: Callable[..., Any], serve: Callable[[Path], str], kind: Path) -> None:
    page = open_page()
    url = serve(kind)
    page.goto(f"{url}/overview")
    drawn(page, 1)  # what is still to be read is said with the first figure
    page.get_by_text("Still reading").wait_for(state="detached", timeout=300_000)
    visit(page, url)


def test_downloads_are_the_reports(
    open_page: Callable[..., Any], serve: Callable[[Path], str], kind: Path
) -> None:
    """To the byte, of everything and of a selection."""
    page = open_page()
    url = serve(kind)
    whole = routeprof.load(kind)
    # A hundred megabytes of windows prove nothing that the other recordings' do not.
    names = [name for name in available(whole) if (kind.name, name) != ("long", "windows")]
    phase = whole.phases[-1]
    for query, profile in (("", whole), (f"?phase={phase}", whole.select(phase=phase))):
        for name in names:
            answer = page.request.get(f"{url}/csv/{name}.csv{query}", timeout=PATIENCE)
            assert answer.body() == csv_text(profile, name).encode(), name
    answer = page.request.get(f"{url}/csv/ranks.csv?ranks=3", timeout=PATIENCE)
    assert answer.body() == csv_text(whole, "ranks", ranks=3).encode()


@contextmanager
def growing(path: Path) -> Iterator[None]:
    """A recording that is written to all the time."""
    writer, done = Writer(path), threading.Event()
    writer.write()

    def grow() -> None:
        number = 0
        while not done.wait(0.2):
            number += 1
            writer.write(("prefill", "decode")[number % 2], (None, "code")[number // 2 % 2])

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_live(open_page: Callable[..., Any], serve: Callable[[Path], str], folder: Path) -> None:
    with growing(folder / "live"):
        visit(open_page(), serve(folder / "live"))


def test_live_on_a_slow_machine(
    open_page: Callable[..., Any],
    serve: Callable[[Path], str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dash drops an answer that a newer request has overtaken: each must come to its end."""

    def slow(*arguments: Any) -> Any:
        sleep(2 * TICK_MS / 1000 + 0.5)  # the work of a slow machine
        return draw(*arguments)

    monkeypatch.setattr(callbacks, "draw", slow)
    with growing(folder / "slow"):
        page = open_page()
        page.goto(f"{serve(folder / 'slow')}/overview")
        drawn(page, 1)
        first = page.locator(".card").first.inner_text()
        page.wait_for_function(
            "before => document.querySelector('.card').innerText !== before", arg=first
        )


@pytest.mark.parametrize("state", ["no directory", "no window", "broken", "not a recording"])
def test_nothing_to_show(
    open_page: Callable[..., Any],
    serve: Callable[[Path], str],
    tmp_path: Path,
    sample: Path,
    state: str,
) -> None:
    """A page that says what is wrong, on every view."""
    path = tmp_path / "place"
    if state == "no window":
        write(path, Shape(layers=2, experts=4, windows=0))
    elif state == "broken":
        shutil.copytree(sample, path)
        (path / "recording.json").write_text("{")
    elif state == "not a recording":
        path.mkdir()
        (path / "notes.txt").write_text("hello")
    page = open_page()
    url = serve(path)
    for view in SHOWN:
        page.goto(f"{url}/{view.path}")
        page.get_by_role("heading", name=view.title, exact=True).wait_for()
        if state == "no window":
            drawn(page, len(view.panels))
        else:
            page.get_by_role("alert").first.wait_for()
            assert page.locator("#content").is_hidden()


# -- several recordings


@pytest.fixture
def two(folder: Path, serve: Callable[[Path], str]) -> str:
    """A server of a directory that holds two recordings."""
    parent = folder / "runs"
    for number, name in enumerate(("monday", "week/tuesday")):
        if not (parent / name).exists():
            writer = Writer(parent / name, rank=0, id=name, started=1e9 + number)
            for _ in range(3 + number):
                writer.write()
            writer.stop()
    return serve(parent)


def test_a_directory_of_recordings(open_page: Callable[..., Any], two: str) -> None:
    page = open_page()
    page.goto(two)
    page.get_by_role("heading", name="Recordings").wait_for()
    page.get_by_role("link", name="week/tuesday").click()
    page.get_by_role("heading", name="Overview").wait_for()
    drawn(page, 1)
    page.get_by_text("in 16 steps").wait_for()
    page.get_by_role("link", name="Compare", exact=True).click()
    compare = next(view for view in VIEWS if view.path == "compare")
    drawn(page, len(compare.panels))
    page.get_by_role("link", name="Recordings", exact=True).click()
    page.get_by_role("link", name="monday").click()
    page.get_by_text("in 12 steps").wait_for()
    assert "run=monday" in page.url
    page.goto(f"{two}/overview?run=..%2F..%2Fetc")
    page.get_by_role("heading", name="Recordings").wait_for()
