from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash import html

import routeprof
from routeprof.dashboards.markup import to_html
from routeprof.dashboards.static import MOST_ROWS, page, write_page
from routeprof.dashboards.views import VIEWS
from routeprof.errors import UsageError
from routeprof.profile import Profile
from tests.dashboards.made import HOSTILE
from tests.dashboards.synthetic import Shape, write

SHOWN = [view for view in VIEWS if "against" not in view.controls]


@pytest.fixture(scope="module")
def profile(recorded: Path) -> Profile:
    return routeprof.load(recorded)


@pytest.fixture(scope="module")
def source(profile: Profile) -> str:
    return page(profile, now=0.0)


def figures(source: str) -> list[Any]:
    texts = re.findall(r'<script type="application/json">(.*?)</script>', source, re.DOTALL)
    return [json.loads(text) for text in texts]


def test_every_view_and_figure_is_there(source: str) -> None:
    assert re.findall(r'class="view" id="([a-z]+)"', source) == [view.path for view in SHOWN]
    assert len(figures(source)) == sum(len(view.panels) for view in SHOWN)


def test_figures_are_those_of_the_dashboard(source: str, profile: Profile) -> None:
    expected = json.loads(profile.heatmap().to_json())
    heatmap = next(figure for figure in figures(source) if figure["data"][0]["type"] == "heatmap")
    assert heatmap["data"] == expected["data"]


def test_nothing_is_loaded_and_names_stay_text(source: str) -> None:
    own = re.sub(r"<script>.*?</script>", "", source, flags=re.DOTALL)  # plotly.js names its site
    assert not re.search(r"(src|href)=\"(?!#)", own)
    assert "url(http" not in own
    assert "default-src 'none'" in own
    assert HOSTILE not in source
    assert "&lt;img src=x" in source
    assert not re.search(r"\b(Click|Drag) ", own)


def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "wide"
    write(path, Shape(layers=4, experts=128, windows=2))
    text = page(routeprof.load(path))
    assert f"the first {MOST_ROWS} of 512 rows" in text


def test_a_recording_without_a_window(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    write(path, Shape(layers=2, experts=8, windows=0))
    file = write_page(routeprof.load(path), tmp_path / "out" / "dashboard.html")
    assert "No routed tokens" in file.read_text("utf-8")


def test_markup_is_html_without_what_needs_a_server() -> None:
    tree = html.Div(
        [html.Span("<b>", title='"x"'), html.Button("?"), None, 3, html.Img(alt="", src="x")],
        className="card",
        **{"aria-label": "a & b"},
    )
    assert to_html(tree) == (
        '<div class="card" aria-label="a &amp; b"><span title="&quot;x&quot;">&lt;b&gt;</span>'
        "3<img></div>"
    )


# -- notebooks


def test_a_figure_for_a_notebook_is_the_views(profile: Profile) -> None:
    figure = profile.heatmap(order="rank", phase="decode", scheme="dark")
    experts = profile.select(phase="decode").experts()
    own = experts[experts["layer"] == 6].sort_values("tokens", ascending=False, kind="stable")
    np.testing.assert_allclose(figure.data[0].customdata[0], own["load_over_mean"], rtol=1e-6)
    assert len(profile.timeline().data) == 3
    assert profile.imbalance().layout.height == 340
    assert profile.figure("overflow", "layers", factor=2.0).data


@pytest.mark.parametrize(
    ("arguments", "state", "says"),
    [
        (("nonsense",), {}, "there is no view 'nonsense'; there are overview, findings"),
        (("layer", "nonsense"), {}, "has no panel 'nonsense'; it has experts"),
        (("layer",), {"colour": "red"}, "colour"),
    ],
)
def test_what_there_is_not(
    profile: Profile, arguments: tuple[str, ...], state: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        profile.figure(*arguments, **state)
