import re
from html.parser import HTMLParser

import numpy as np

from routeprof.report import html, summary
from routeprof.topology import ModelInfo
from tests.report.conftest import build, large, moe

HOSTILE = "<script>alert('x')</script>&\"=HYPERLINK(1)$\\frac{" + "long" * 40
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements, attributes and tables; fails where a tag is not closed."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements, self.rows, self.words = [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_tables_say_what_the_counts_say(profile, counts):
    page, sums = Page(html.html_text(profile)), counts.sum(0)
    ratios = sums.max(1) / sums.mean(1)
    layers = [row for row in page.rows if row[-1].startswith("model.layers")]
    assert [int(row[0]) for row in layers] == np.argsort(-ratios, kind="stable").tolist()
    for row in layers:
        assert row[1] == "60"
        assert row[2] == f"{ratios[int(row[0])]:.2f}"
    groups = {row[0]: row[1:] for row in page.rows if row[0] in ("prefill", "code")}
    part = counts[:2].sum(0)
    part = part.max(1) / part.mean(1)
    median, worst = f"{np.median(part):.2f}", f"{part.max():.2f}"
    assert groups["prefill"] == ["2", "20", median, worst, str(part.argmax())]
    assert groups["code"][:2] == ["4", "40"]


def test_findings_come_first_and_uncaptured_layers_have_no_row(partial):
    source = html.html_text(partial)
    page = Page(source)
    said = "".join(page.words)
    first = said.index("1 layer never ran a hook although the model ran: 2.")
    assert first < said.index("1 layer cannot be read: 3") < said.index("Key figures")
    assert [row[0] for row in page.rows if row[-1].startswith("model.")] == ["1"]
    assert "not captured (silent): layer 2" in said


def test_every_figure_is_described(profile):
    page = Page(html.html_text(profile))
    figures = [item["id"] for item in page.named("figure")]
    images = page.named("svg")
    assert figures == list(html.CAPTIONS)
    assert len(images) == len(figures)
    for name, image in zip(figures, images, strict=True):
        assert image["role"] == "img"
        assert html.CAPTIONS[name] in image["aria-label"]


def test_nothing_is_loaded_and_ids_are_unique(profile):
    source = html.html_text(profile)
    page = Page(source)
    assert not re.search(r"https?://|//[a-z]|@import", source)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    references = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href")
    ]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for value in references:
        assert value.startswith("data:image/png;base64,") or value[1:] in ids
    assert set(re.findall(r"url\(#([^)]+)\)", source)) <= set(ids)


def test_hostile_names_stay_text(counts):
    layers = [moe(n, name=f"{HOSTILE}{n}", note=HOSTILE) for n in range(3)]
    layers.append(moe(3, unsupported=HOSTILE))
    model = ModelInfo(HOSTILE, HOSTILE, None, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    profile = build(layers, {("decode", HOSTILE): counts}, model=model)
    source = html.html_text(profile)
    page = Page(source)
    assert "<script" not in source
    assert not page.named("script")
    assert not any(name.startswith("on") for _, own in page.elements for name in own)
    assert sum(HOSTILE in words for words in page.words) >= 6


def test_control_characters_are_shown_as_such(counts):
    model = ModelInfo(name="a\x00b\u202e")
    source = html.html_text(build([moe(n) for n in range(4)], {("d", None): counts}, model=model))
    assert "\x00" not in source
    assert "\u202e" not in source
    assert "a�b�" in source


def test_light_dark_and_paper(profile):
    source = html.html_text(profile)
    assert "prefers-color-scheme: dark" in source
    assert "@media print" in source
    assert ": currentColor" in source
    assert html.INK not in source


def test_large_models_make_small_files():
    source = html.html_text(large(steps=2))
    assert len(source.encode()) < 2_000_000
    assert len([row for row in Page(source).rows if row[-1].startswith("model.layers")]) == 58


def test_written_with_its_folder_and_the_same_twice(profile, tmp_path):
    file = html.write_html(profile, tmp_path / "a" / "report.html")
    assert file.read_bytes().decode() == html.html_text(profile)


def test_nothing_captured_still_makes_a_report():
    page = Page(html.html_text(build([moe(0)], {})))
    assert "no forward pass was recorded" in "".join(page.words)
    assert page.rows == []


def test_columns_are_defined(profile):
    said = "".join(Page(html.html_text(profile)).words)
    assert all(column.meaning in said for column in summary.COLUMNS)
