from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.capture.control import rank_states
from routeprof.dashboards import create_app
from routeprof.dashboards.figures.palette import PALETTES, Scheme
from routeprof.dashboards.serve import make_server
from routeprof.dashboards.views import VIEWS
from routeprof.report.csv import csv_text
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import MIXTRAL
from tests.dashboards.made import HOSTILE, LONG, Writer
from tests.dashboards.tokens import record_tokens

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
PATIENCE = 600_000  # milliseconds: a guard against waiting for ever, and no target
expect.set_options(timeout=PATIENCE)

pytestmark = pytest.mark.browser

ALONE = [view for view in VIEWS if "against" not in view.controls]
"""Views in the menu of a single recording."""

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="module")
def browser(serve: Callable[[Path], str]) -> Iterator[Any]:
    """Chromium; it is closed before the servers, whose connections it holds."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    servers: list[tuple[Any, threading.Thread]] = []

    def start(*paths: Path) -> str:
        server = make_server(create_app(*paths), port=0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.effective_port}"

    yield start
    for server, thread in servers:
        stop(server, thread)


def stop(server: Any, thread: threading.Thread) -> None:
    """Close a server in its own thread, which may just be waiting for its sockets."""
    server.trigger.pull_trigger(server.close)
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def url(serve: Callable[[Path], str], recorded: Path) -> str:
    return serve(recorded)


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """One window for most tests: its cache saves loading the scripts again."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture
def open_page(window: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page, and afterwards asserts that it was quiet and kept to this machine."""
    complaints: list[str] = []
    requests: list[str] = []

    def start(scheme: Scheme = "light", width: int = 1280, height: int = 900) -> Any:
        page = window.new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: listen(message.type, message.text))
        return page

    def listen(kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            complaints.append(text)

    yield start
    for page in window.pages:
        page.close()
    assert not complaints
    own = re.compile(r"(http://127\.0\.0\.1:|data:|blob:)")
    elsewhere = [url for url in requests if not own.match(url)]
    assert not elsewhere


def drawn(page: Any, number: int) -> None:
    """Wait until all figures of a view have come."""
    page.wait_for_function(
        """number => {
            const plots = [...document.querySelectorAll(".js-plotly-plot")];
            return plots.length === number && plots.every(plot => plot._fullLayout?.uirevision);
        }""",
        arg=number,
    )


def ticks(page: Any) -> Any:
    """A label on a figure's axis."""
    return page.locator(".js-plotly-plot .xtick text").first


def rgb(colour: str) -> str:
    """``#2b3138`` as the browser says it."""
    parts = ", ".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))
    return f"rgb({parts})"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_in_both_schemes(
    open_page: Callable[..., Any], url: str, scheme: Scheme
) -> None:
    page = open_page(scheme)
    page.goto(f"{url}/")
    for view in ALONE:
        page.get_by_role("link", name=view.title, exact=True).click()
        expect(page.get_by_role("heading", name=view.title, exact=True)).to_be_visible()
        expect(page.get_by_text(view.question)).to_be_visible()
        drawn(page, len(view.panels))
        for panel in view.panels:
            expect(page.get_by_role("img", name=panel.label)).to_be_visible()
        # There are no axes without steps and tokens, or without a known model.
        if view.path not in ("affinity", "layouts", "plan"):
            expect(ticks(page)).to_have_css("fill", rgb(PALETTES[scheme].ink))
        assert page.locator("[data-title*='hare'], [data-title*='loud']").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.title() == "made-up · routeprof"


def test_narrow_screens_do_not_scroll_sideways(open_page: Callable[..., Any], url: str) -> None:
    page = open_page(width=390, height=844)
    page.goto(f"{url}/")
    for view in ALONE:
        page.get_by_role("button", name="Menu").click()
        page.get_by_role("link", name=view.title, exact=True).click()
        expect(page.get_by_role("heading", name=view.title, exact=True)).to_be_visible()
        expect(page.get_by_role("link", name=view.title, exact=True)).not_to_be_in_viewport()
        drawn(page, len(view.panels))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_scheme_button_changes_page_and_figures(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page("light")
    page.goto(f"{url}/timeline")
    drawn(page, 2)
    expect(ticks(page)).to_have_css("fill", rgb(PALETTES["light"].ink))
    page.get_by_role("button", name="Light or dark").click()
    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", "dark")
    expect(ticks(page)).to_have_css("fill", rgb(PALETTES["dark"].ink))
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", "dark")
    page.evaluate("localStorage.clear()")


def test_download_is_byte_equal_to_the_report(
    open_page: Callable[..., Any], url: str, recorded: Path
) -> None:
    page = open_page()
    for address, name, selection in [
        ("/", "layers", {}),
        ("/heatmap?phase=decode", "experts", {"phase": "decode"}),
        ("/overflow?tag=code", "overflow", {"tag": "code"}),
    ]:
        page.goto(f"{url}{address}")
        with page.expect_download() as waiting:
            page.get_by_role("link", name=f"{name}.csv").click()
        profile = routeprof.load(recorded).select(**selection)
        assert waiting.value.suggested_filename == f"{name}.csv"
        assert Path(waiting.value.path()).read_bytes() == csv_text(profile, name).encode()


def test_the_address_holds_the_state(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/layer?phase=decode&layer=2&order=load")
    expect(page.get_by_text("Layer 2, decode, all tags")).to_be_visible()
    expect(page.get_by_role("textbox", name="Phase")).to_have_value("decode")
    page.get_by_role("textbox", name="Phase").click()
    page.get_by_role("option", name="prefill").click()
    expect(page).to_have_url(re.compile(r"/layer\?phase=prefill&layer=2&order=load$"))
    expect(page.get_by_text("Layer 2, prefill, all tags")).to_be_visible()
    page.go_back()
    expect(page.get_by_text("Layer 2, decode, all tags")).to_be_visible()
    expect(page.get_by_role("textbox", name="Phase")).to_have_value("decode")
    link = page.get_by_role("link", name="Overflow", exact=True)
    expect(link).to_have_attribute("href", re.compile("phase=decode"))
    link.click()
    expect(page).to_have_url(re.compile(r"/overflow\?phase=decode&layer=2$"))
    page.get_by_role("slider", name="Capacity factor").press("ArrowRight")
    expect(page).to_have_url(re.compile(r"factor=2"))
    expect(page.get_by_text("Each layer at capacity factor 2, decode")).to_be_visible()


def test_nonsense_in_the_address_is_a_notice(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/heatmap?layer=99&phase=%3Cb%3E&file=../../etc/passwd")
    expect(page.get_by_role("alert")).to_have_count(3)
    expect(page.get_by_text("Ignored phase=<b>")).to_be_visible()
    drawn(page, 1)
    page.goto(f"{url}/../../etc/passwd")
    expect(page.get_by_text("No such view")).to_be_visible()


def test_a_click_on_the_heatmap_opens_the_expert(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/heatmap?phase=decode")
    drawn(page, 1)
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 15)
    expect(page.locator(".hoverlayer")).to_contain_text("layer 1")
    page.mouse.click(box["x"] + box["width"] / 3, box["y"] + 15)
    expect(page).to_have_url(re.compile(r"/expert\?phase=decode&layer=1&expert=5$"))


def test_numbers_unfold_and_missing_ones_are_dashes(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page()
    page.goto(f"{url}/health")
    drawn(page, 1)
    page.get_by_role("button", name="Numbers", exact=True).click()
    row = page.locator(".ag-row", has_text="silent")
    expect(row.locator("[col-id='tokens']")).to_have_text("–")
    expect(row.locator("[col-id='assignments']")).to_have_text("–")
    expect(row.locator("[col-id='coverage']")).to_have_text("0.00%")
    captured = page.locator(".ag-row", has_text="captured").first
    expect(captured.locator("[col-id='tokens']")).to_have_text("1,088")


def test_unfolded_numbers_follow_and_stay_sorted(
    open_page: Callable[..., Any], serve: Callable[[Path], str], writer: Writer
) -> None:
    writer.write("prefill")
    page = open_page()
    page.goto(f"{serve(writer.path)}/health")
    drawn(page, 1)
    page.get_by_role("button", name="Numbers", exact=True).click()
    order = page.locator("[role='columnheader'][col-id='layer']")
    order.click()
    order.click()
    cells = page.locator(".ag-row[row-index='0'] [col-id='tokens']")
    expect(order).to_have_attribute("aria-sort", "descending")
    expect(cells).to_have_text("256")
    writer.write("prefill")
    expect(cells).to_have_text("512")
    page.get_by_role("button", name="Numbers", exact=True).click()
    with page.expect_response(lambda answer: "cards" in (answer.request.post_data or "")):
        writer.write("prefill")
    page.get_by_role("button", name="Numbers", exact=True).click()
    expect(cells).to_have_text("768")
    expect(order).to_have_attribute("aria-sort", "descending")


def test_hostile_names_are_text(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/overview")
    expect(page.get_by_text(f"no router found in {HOSTILE}")).to_be_visible()
    expect(page.locator("#model")).to_have_text(f"model {HOSTILE}")
    page.get_by_role("textbox", name="Tag").click()
    page.get_by_role("option", name=HOSTILE).click()
    expect(page.get_by_text(f"tag {HOSTILE}").first).to_be_visible()
    page.get_by_role("textbox", name="Tag").click()
    page.get_by_role("option", name=LONG).click()
    expect(page.get_by_text(f"tag {LONG}").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("img[src='x']").count() == 0
    assert page.title() == "made-up · routeprof"


def test_terms_are_explained(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/overview")
    drawn(page, 1)  # which sets the cards once more
    page.locator("#cards .why").nth(3).focus()
    expect(page.get_by_role("tooltip")).to_contain_text("Load of the hottest expert")


def test_two_recordings_are_compared(
    open_page: Callable[..., Any], serve: Callable[..., str], tmp_path: Path
) -> None:
    for number, name in enumerate(("monday", "tuesday")):
        writer = Writer(tmp_path / name, id=name)
        writer.random = np.random.default_rng(number)
        for _ in range(3):
            writer.write()
    page = open_page()
    page.goto(f"{serve(tmp_path / 'monday', tmp_path / 'tuesday')}/")
    page.get_by_role("link", name="Compare", exact=True).click()
    drawn(page, 3)
    expect(page.locator(".card", has_text="Tokens, A")).to_contain_text("monday")
    expect(page.locator(".card", has_text="Tokens, B")).to_contain_text("tuesday")
    page.get_by_role("textbox", name="Compare with").click()
    page.get_by_role("option", name="monday", exact=True).click()
    expect(page).to_have_url(re.compile(r"/compare\?against=monday$"))
    expect(page.locator(".card", has_text="Tokens, A")).to_contain_text("tuesday")
    page.get_by_role("textbox", name="Layer").click()
    page.get_by_role("option", name="1", exact=True).click()
    expect(page.get_by_text("Layer 1: share of the load in B minus that in A")).to_be_visible()


def test_ranks_are_chosen(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/ranks?ranks=4")
    expect(page.get_by_text("Load of each of 4 ranks")).to_be_visible()
    page.get_by_text("Striped", exact=True).click()
    expect(page).to_have_url(re.compile(r"/ranks\?ranks=4&placement=striped$"))
    expect(page.get_by_text("with expert i on rank i mod 4;")).to_be_visible()
    expect(page.get_by_text("As recorded", exact=True)).to_have_count(0)


def test_placements_are_made_where_they_are_asked_for(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page()
    page.goto(f"{url}/ranks?ranks=4")
    expect(page.get_by_text("Made where it is asked for")).to_be_visible()
    page.get_by_role("textbox", name="Replicas of experts").click()
    page.get_by_role("option", name="1 a rank").click()
    expect(page).to_have_url(re.compile(r"/ranks\?ranks=4&redundant=1$"))
    expect(page.get_by_text("20 slots a layer, 4 of them redundant")).to_be_visible()
    expect(page.locator("code")).to_contain_text("--gpus 4 --slots 20 --out placed")
    page.get_by_role("textbox", name="Replicas of experts").click()
    page.get_by_role("option", name="Not computed").click()
    expect(page).to_have_url(re.compile(r"/ranks\?ranks=4$"))
    expect(page.get_by_text("Made where it is asked for")).to_be_visible()


def test_prompts_compose_batches_where_they_are_asked_for(
    open_page: Callable[..., Any], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    path = record_tokens(tmp_path / "run", "code", HOSTILE, rows=12, tokens=8)
    page = open_page()
    page.goto(f"{serve(path)}/prompts")
    expect(page.get_by_text("Made where it is asked for")).to_be_visible()
    expect(page.locator("code")).to_have_count(0)
    page.get_by_role("textbox", name="Batch size").click()
    page.get_by_role("option", name="4", exact=True).click()
    expect(page).to_have_url(re.compile(r"/prompts\?batch=4$"))
    expect(page.get_by_text("24 requests in full batches of 4")).to_be_visible()
    plot = page.locator(".js-plotly-plot").last
    expect(plot.locator(".errorbar")).to_have_count(4)
    expect(plot.locator(".legendtext")).to_have_text(["straggler factor", "imbalance ratio"])
    expect(page.locator("code")).to_contain_text("--batch-sizes 4 --ranks 8 --phase decode")
    page.get_by_role("textbox", name="Phase").click()
    page.get_by_role("option", name="prefill").click()
    expect(page.get_by_text("Supposed: prefill, all tags")).to_be_visible()
    page.get_by_role("textbox", name="Tag").click()
    page.get_by_role("option", name=HOSTILE).click()
    expect(page.locator("code")).to_contain_text(f"--phase prefill --tag {quote(HOSTILE)}")
    page.get_by_role("textbox", name="Batch size").click()
    page.get_by_role("option", name="16", exact=True).click()
    expect(page.get_by_text("Batch size 16 is more than the 12")).to_be_visible()
    page.get_by_role("textbox", name="Batch size").click()
    page.get_by_role("option", name="Not computed").click()
    expect(page.get_by_text("Made where it is asked for")).to_be_visible()
    assert page.locator("img[src='x']").count() == 0


def test_layouts_are_chosen(
    open_page: Callable[..., Any], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    page = open_page()
    page.goto(f"{serve(record_tokens(tmp_path / 'run', HOSTILE))}/layouts")
    drawn(page, 1)
    expect(page.locator(".js-plotly-plot .ytick")).to_have_count(12)
    page.get_by_role("textbox", name="GPUs").click()
    page.get_by_role("option", name="16", exact=True).click()
    page.get_by_role("textbox", name="Nodes").click()
    page.get_by_role("option", name="2", exact=True).click()
    page.get_by_role("textbox", name="GPU", exact=True).click()
    page.get_by_role("option", name="H200").click()
    expect(page).to_have_url(re.compile(r"/layouts\?ranks=16&nodes=2&gpu=h200$"))
    expect(page.get_by_text("on 16 GPUs on 2 nodes")).to_be_visible()
    expect(page.locator("code")).to_contain_text("--gpus 16 --nodes 2 --gpu h200")
    page.get_by_role("button", name="Numbers", exact=True).click()
    expect(page.locator("[role='columnheader'][col-id='step_ms']")).to_have_count(1)
    page.get_by_role("textbox", name="Tag").click()
    page.get_by_role("option", name=HOSTILE).click()
    expect(page.locator("code")).to_contain_text(f"--tag {quote(HOSTILE)}")
    assert page.locator("img[src='x']").count() == 0


def test_findings_are_judged_where_they_are_asked_for(
    open_page: Callable[..., Any], serve: Callable[[Path], str]
) -> None:
    page = open_page()
    page.goto(f"{serve(RECORDINGS_DIR / 'collapsed')}/findings?ranks=8")
    drawn(page, 1)
    expect(page.get_by_text("computed where it is asked for")).to_be_visible()
    expect(page.locator(".findings code")).to_have_text(["hot-experts", "small-gemms"])
    page.get_by_role("textbox", name="Rules and gains").click()
    page.get_by_role("option", name="Computed", exact=True).click()
    expect(page).to_have_url(re.compile(r"/findings\?ranks=8&gains=yes$"))
    expect(page.locator(".findings code")).to_have_text(
        ["model-skew", "rank-imbalance", "small-gemms"]
    )
    expect(page.locator(".finding-gain").first).to_contain_text("the fullest rank would have")
    expect(page.locator(".unjudged code")).to_contain_text(["overflow", "cross-node"])
    expect(page.locator(".command")).to_have_text("routeprof diagnose RECORDING --gpus 8")
    page.get_by_role("link", name="see Ranks").first.click()
    expect(page).to_have_url(re.compile(r"/ranks\?ranks=8&redundant=0&gains=yes$"))
    expect(page.get_by_role("heading", name="Ranks", exact=True)).to_be_visible()
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_text("Nothing is known to be missing")).to_be_visible()


def test_a_plan_is_chosen(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/plan")
    expect(page.get_by_text("not one of the known")).to_be_visible()
    page.get_by_role("textbox", name="Model").click()
    page.get_by_role("option", name="mixtral-8x7b").click()
    expect(page.locator("#cards .card", has_text="Parameters")).to_contain_text("46.70 B")
    drawn(page, 1)
    page.get_by_role("textbox", name="GPUs").click()
    page.get_by_role("option", name="4", exact=True).click()
    page.get_by_role("textbox", name="GPU memory").click()
    page.get_by_role("option", name="24 GiB").click()
    page.get_by_role("textbox", name="Type of weights").click()
    page.get_by_role("option", name="FP8", exact=True).click()
    expect(page).to_have_url(re.compile(r"/plan\?ranks=4&model=mixtral-8x7b&memory=24&dtype=fp8$"))
    expect(page.locator(".command")).to_contain_text("--gpus 4 --gpu-memory 24GiB --dtype fp8")
    expect(page.locator(".js-plotly-plot .legendtext").first).to_have_text("attention")
    expect(page.get_by_text("recording is of another model")).to_be_visible()
    page.get_by_role("button", name="Numbers", exact=True).click()
    expect(page.locator("[role='columnheader'][col-id='routed_gib']")).to_have_count(1)


def test_live_updates_and_the_pause_button(
    open_page: Callable[..., Any], serve: Callable[[Path], str], writer: Writer
) -> None:
    page = open_page()
    page.goto(f"{serve(writer.path)}/overview")
    tokens = page.locator("#cards .card", has_text="Tokens").first.locator(".card-value")
    expect(tokens).to_have_text("–")
    drawn(page, 1)
    for total in ("256", "512"):
        writer.write("prefill")
        expect(tokens).to_have_text(total)
    expect(page.locator("#activity")).to_have_text("live")
    writer.write("decode", "new tag")
    page.get_by_role("textbox", name="Tag").click()
    expect(page.get_by_role("option", name="new tag")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    writer.write("prefill")
    page.get_by_role("button", name="Resume").click()
    expect(tokens).to_have_text("1,024")
    writer.stop()
    expect(page.locator("#activity")).to_have_text("stopped")


def test_the_zoom_survives_new_windows(
    open_page: Callable[..., Any], serve: Callable[[Path], str], writer: Writer
) -> None:
    writer.write()
    page = open_page()
    page.goto(f"{serve(writer.path)}/overview")
    drawn(page, 1)
    plot = page.locator(".js-plotly-plot .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 50, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, middle + 5, steps=5)
    page.mouse.up()
    ticks = "() => document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[1]"
    page.wait_for_function(f"({ticks})() < 5")
    zoomed = page.evaluate(ticks)
    writer.write()
    expect(page.get_by_text("in 8 steps")).to_be_visible()
    assert page.evaluate(ticks) == zoomed


def test_an_empty_directory_says_so_and_wakes_up(
    open_page: Callable[..., Any], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    page = open_page()
    page.goto(f"{serve(place)}/heatmap")
    expect(page.get_by_role("alert")).to_contain_text("no recording.json")
    expect(page.get_by_role("heading", name="Experts by layer")).to_be_hidden()
    Writer(place).write()
    drawn(page, 1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_range_of_time_is_dragged_kept_and_cleared(
    open_page: Callable[..., Any], url: str, recorded: Path
) -> None:
    page = open_page()
    page.goto(f"{url}/timeline")
    drawn(page, 2)
    plot = page.locator(".js-plotly-plot .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=8)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"between=\d"))
    low, high = (float(text) for text in page.url.split("between=")[1].split("-"))
    link = page.get_by_role("link", name="Heatmap", exact=True)
    expect(link).to_have_attribute("href", re.compile("between="))
    link.click()
    drawn(page, 1)
    expect(page.get_by_text(re.compile(rf"all tags, {low:g} to {high:g} s"))).to_be_visible()
    whole = routeprof.load(recorded)
    chosen = whole.select(between=whole.since_start((low, high)))
    assert 0 < chosen.totals.sums["steps"].sum() < whole.totals.sums["steps"].sum()
    with page.expect_download() as download:
        page.get_by_role("link", name="experts.csv").click()
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text == csv_text(chosen, "experts")
    page.get_by_role("button", name=re.compile(r" s×$")).click()
    expect(page).not_to_have_url(re.compile("between="))


def test_the_time_slider_works_by_keyboard(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    page.goto(f"{url}/heatmap")
    drawn(page, 1)
    expect(page.get_by_text("all 8 s")).to_be_visible()
    slider = page.get_by_role("slider", name="From, seconds")
    for _ in range(5):
        slider.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"between=5-$"))
    for _ in range(5):
        slider.press("ArrowLeft")
    expect(page).not_to_have_url(re.compile("between="))


def test_the_recording_is_held_and_stopped_from_the_page(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    path = tmp_path / "live"
    with routeprof.record(model, path, window=0.1) as recording:
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
        server = make_server(create_app(path, control=True), port=0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        page = open_page()
        page.goto(f"http://127.0.0.1:{server.effective_port}/overview")
        drawn(page, 1)
        page.get_by_role("button", name="Hold").click()
        expect(page.locator("#activity")).to_have_text("paused")
        page.get_by_role("button", name="Record").click()
        expect(page.locator("#activity")).to_have_text(re.compile("live|idle"))
        answers = iter(["dismiss", "accept"])
        page.on("dialog", lambda dialog: getattr(dialog, next(answers))())
        for state in ("recording", "stopped"):
            with page.expect_event("dialog"):
                page.get_by_role("button", name="Stop").click()
            if state == "recording":
                assert rank_states(path)[0].state == state
        expect(page.locator("#activity")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Hold")).to_be_hidden()
        page.close()
        stop(server, thread)
    assert recording.directory == path
