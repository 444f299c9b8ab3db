"""How fast the dashboard is on a big recording: ``python -m tests.bench dashboard``.

A server in a process of its own, a recording of 61 layers, 256 experts and 10,000 windows, and a
real browser that measures what its user waits for: the first paint with the key figures, that
with a figure too, and, for each view, a change of the phase until the new figures are drawn.
Then clients that ask as open pages do, while a process records.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any

import routeprof
from routeprof.dashboards.views import VIEWS
from tests.bench.kept import Figure, figure
from tests.dashboards.made import Writer
from tests.dashboards.synthetic import Shape, write

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync".split()
CHANGES, CLIENTS, SECONDS = 5, 20, 20.0

SAID = """() => document.querySelectorAll("#content:not([hidden]) .card-value").length > 1"""

DRAWN = """number => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    return plots.length >= 1 && plots.every(plot => plot._fullLayout?.uirevision)
        && document.querySelectorAll("#content:not([hidden])").length === 1;
}"""

CHANGED = """async ([query, path]) => {
    // From the change of the address, as a control makes it, until every figure is drawn anew.
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    const drawn = plots.map(plot => new Promise(done => plot.once("plotly_afterplot", done)));
    const start = performance.now();
    history.pushState({}, "", path + query);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    await Promise.all(drawn);
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""


@contextmanager
def server(path: Path) -> Iterator[tuple[str, int]]:
    """``routeprof dashboard`` on a recording: its address and process id."""
    command = [sys.executable, "-m", "routeprof", "dashboard", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split(" at ")[1].split(" ")[0].rstrip("/"), process.pid
    finally:
        process.terminate()
        process.wait()


def wait_until_read(browser: Any, url: str) -> float:
    """Seconds until the page no longer says that parts are still being read."""
    start = perf_counter()
    page = browser.new_page()
    page.goto(f"{url}/overview")
    page.wait_for_function(DRAWN, arg=1)
    page.get_by_text("Still reading").wait_for(state="detached", timeout=600_000)
    page.close()
    return perf_counter() - start


def memory(pid: int) -> float:
    """Largest resident memory of a process so far, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# -- one user


def paints(browser: Any, url: str) -> list[tuple[float, float]]:
    """Milliseconds until the key figures are there and until a figure is, in fresh browsers."""
    times = []
    for _ in range(5):
        context = browser.new_context()
        page = context.new_page()
        start = perf_counter()
        page.goto(f"{url}/overview", wait_until="commit")
        page.wait_for_function(SAID)
        said = 1e3 * (perf_counter() - start)
        page.wait_for_function(DRAWN, arg=1)
        times.append((said, 1e3 * (perf_counter() - start)))
        context.close()
    return times


def changes(browser: Any, url: str) -> dict[str, list[float]]:
    """Milliseconds of each change of the phase, by view."""
    page = browser.new_page()
    found = {}
    for view in (view.path for view in VIEWS if "against" not in view.controls):
        page.goto(f"{url}/{view}")
        page.wait_for_function(DRAWN, arg=1)
        queries = ["?phase=decode", "?phase=prefill"] * CHANGES
        times = [page.evaluate(CHANGED, [query, f"/{view}"]) for query in queries]
        found[view] = times[2:]
    page.close()
    return found


def follows(browser: Any, path: Path) -> list[float]:
    """Milliseconds from the end of a window's part until the page has its tokens."""
    writer = Writer(path)
    writer.write()
    times = []
    with server(path) as (url, _):
        page = browser.new_page()
        page.goto(f"{url}/overview")
        page.wait_for_function(DRAWN, arg=1)
        for number in range(2 * CHANGES):
            page.wait_for_timeout(1000 + 137 * number)  # anywhere between two looks
            before = page.locator(".card-value").first.inner_text()
            writer.write()
            start = perf_counter()
            page.wait_for_function(
                "before => document.querySelector('.card-value').innerText !== before", arg=before
            )
            times.append(1e3 * (perf_counter() - start))
        page.close()
    return times


# -- many


@dataclass(frozen=True)
class Asked:
    """What a page sends: where to, and the bodies of the callbacks that a tick leads to."""

    url: str
    tick: bytes
    draw: bytes


def listen(browser: Any, url: str) -> Asked:
    """Have a page open for a while, and take down what it sends."""
    bodies: dict[str, bytes] = {}
    page = browser.new_page()

    def note(request: Any) -> None:
        body = request.post_data or ""
        if "_dash-update-component" in request.url:
            kind = "draw" if "cards.children" in body else "tick" if "said.data" in body else ""
            bodies[kind], bodies["url"] = body.encode(), request.url.encode()

    page.on("request", note)
    page.goto(f"{url}/overview")
    while len(bodies.keys() & {"tick", "draw"}) < 2:
        page.wait_for_timeout(100)
    page.close()
    return Asked(bodies["url"].decode(), bodies["tick"], bodies["draw"])


def clients(asked: Asked) -> tuple[list[float], list[str]]:
    """Milliseconds of every callback of many clients, each asking once a second; and errors."""
    times: list[float] = []
    errors: list[str] = []
    end = perf_counter() + SECONDS

    def client(number: int) -> None:
        sleep(number / CLIENTS)
        while perf_counter() < end:
            begun = perf_counter()
            for body in (asked.tick, asked.draw):
                try:
                    times.append(_post(asked.url, body))
                except OSError as error:
                    errors.append(str(error))
            sleep(max(0.0, 1.0 - (perf_counter() - begun)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, errors


def _post(url: str, body: bytes) -> float:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    start = perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
    return 1e3 * (perf_counter() - start)


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """A process that runs a model under routeprof all the time."""
    process = subprocess.Popen([sys.executable, "-m", __name__, str(path)])
    try:
        while not list(path.glob("rank-*/part-*.parquet")):
            sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def run_model(path: Path) -> None:
    """Be that process."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=8,
        num_local_experts=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(0, 256, (4, 32))
    with routeprof.record(model, path, window=0.5), torch.inference_mode():
        while True:
            model(input_ids=ids)


def slowdown(path: Path, quiet: tuple[float, float], busy: tuple[float, float]) -> float:
    """Passes a second of the recorded process in one time ÷ in another, by its own windows."""
    profile = routeprof.load(path)
    windows = profile.totals.windows
    first = windows.layer == windows.layer.min()

    def rate(between: tuple[float, float]) -> float:
        inside = first & (windows.start >= between[0]) & (windows.end <= between[1])
        seconds = (windows.end - windows.start)[inside].sum()
        return float(windows.steps[inside].sum() / seconds)

    return rate(busy) / rate(quiet)


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """The suite's name, how it was measured, and its figures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="make bench-dashboard", description=__doc__)
    parser.add_argument("--windows", type=int, default=10_000)
    windows = parser.parse_args(arguments).windows
    with (
        tempfile.TemporaryDirectory(prefix="routeprof-bench-") as folder,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        figures = [*one_user(browser, Path(folder), windows), *many(browser, Path(folder))]
        browser.close()
    yield "dashboard", f"{windows:,} windows of one part each.", figures


def milliseconds(row: str, values: Sequence[float] | float, **options: Any) -> Figure:
    defaults = {"unit": "ms", "digits": 0, "better": "lower"}
    return figure("dashboard", row, "", values, **defaults | options)


def one_user(browser: Any, folder: Path, windows: int) -> Iterator[Figure]:
    big = folder / "big"
    write(big, Shape(windows=windows))
    with server(big) as (url, pid):
        cold = paints(browser, url)[0]
        read = wait_until_read(browser, url)
        said, drawn = zip(*paints(browser, url), strict=True)
        every = changes(browser, url)
        together = [time for times in every.values() for time in times]
        medians = [statistics.median(times) for times in every.values()]
        peak = memory(pid)
    yield milliseconds(PAINT, said, target=2_500.0)
    yield milliseconds("with the first figure too, ms", drawn)
    yield milliseconds("key figures while parts are still being read, ms", cold[0])
    yield milliseconds("the first figure while parts are still being read, ms", cold[1])
    yield milliseconds(CHANGE, together, target=300.0)
    yield milliseconds("the quickest view, ms", min(medians))
    yield milliseconds("the slowest view, ms", max(medians))
    times = follows(browser, folder / "growing")
    yield milliseconds("a new window of a live recording is on the page after, ms", times)
    yield milliseconds("the same, at most, ms", max(times), target=2_000.0)
    yield milliseconds("all parts read, s", read, unit="s")
    yield milliseconds("largest memory of the server, MiB", peak, unit="MiB", target=1_024.0)


PAINT = "first paint with the key figures and findings, in a fresh browser, ms"
CHANGE = "change of the phase until all figures are drawn, all views, ms"


def many(browser: Any, folder: Path) -> Iterator[Figure]:
    live = folder / "live"
    with recording(live), server(live) as (url, _):
        # They would be other machines' browsers: they leave this one's cores to the model.
        os.nice(19)
        asked = listen(browser, url)
        begun = time()
        sleep(SECONDS)
        between = time()
        times, errors = clients(asked)
        ended = time()
        p95 = statistics.quantiles(times, n=20)[-1]
        ratio = slowdown(live, (begun, between), (between, ended))
    name = f"{CLIENTS} clients, each with two callbacks a second"
    yield milliseconds(
        f"{name}: errors", float(len(errors)), unit="of the callbacks", target=0.0, exact=True
    )
    yield milliseconds(f"{name}: median of a callback, ms", statistics.median(times))
    yield milliseconds(f"{name}: p95 of a callback, ms", p95, target=1_000.0)
    kept = "passes a second of the recorded process, with the clients ÷ without"
    yield milliseconds(kept, ratio, unit="", digits=3, better="higher", target=1.0)


if __name__ == "__main__":
    run_model(Path(sys.argv[1]))
