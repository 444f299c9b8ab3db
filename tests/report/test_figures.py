import subprocess
import sys
import threading
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from routeprof.errors import UsageError
from routeprof.report import figures
from routeprof.topology import Layer, ModelInfo
from tests.report.conftest import build, large, moe


def texts(figure):
    axes = [text for ax in figure.axes for text in ax.texts]
    return [text.get_text() for text in axes]


def labelled(axes):
    return dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))


def test_heatmap_shows_counts_over_mean(profile, counts):
    image = figures.heatmap(profile).axes[0].images[0]
    sums = counts.sum(0)
    np.testing.assert_allclose(image.get_array(), sums / sums.mean(1, keepdims=True))
    assert image.norm(1.0) == pytest.approx(0.5)
    assert image.norm(2.0) - 0.5 == pytest.approx(0.5 - image.norm(0.5))


def test_heatmap_masks_what_was_not_captured_and_says_so(partial, counts):
    axes = figures.heatmap(partial).axes[0]
    data = axes.images[0].get_array()
    assert data.shape == (3, 8)
    assert data.mask[1:].all()
    own = counts.sum(0)[1]
    np.testing.assert_allclose(data[0], own / own.mean())
    assert texts(axes.figure) == ["not captured: silent", "not captured: unsupported"]
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert [patch.get_y() for patch in hatched] == [0.5, 1.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "3"]


def test_heatmap_masks_beyond_a_layers_own_experts():
    counts = np.zeros((1, 2, 8), int)
    counts[0, 0], counts[0, 1, :4] = 2, [4, 0, 2, 2]
    profile = build([moe(0), moe(1, experts=4)], {("decode", None): counts})
    data = figures.load_over_mean(profile)
    assert data.mask.tolist() == [[False] * 8, [False] * 4 + [True] * 4]
    assert data[1, :4].tolist() == [2.0, 0.0, 1.0, 1.0]


def test_a_dead_expert_is_below_the_scale_and_not_blank():
    profile = build([moe(0, experts=4)], {("decode", None): np.array([[[4, 0, 2, 2]]])})
    image = figures.heatmap(profile).axes[0].images[0]
    colours = image.cmap(image.norm(image.get_array()))
    np.testing.assert_allclose(colours[0, 1], image.cmap.get_under())


def test_imbalance_by_layer(profile, counts):
    axes = figures.imbalance_by_layer(profile).axes[0]
    sums, lines = counts.sum(0), labelled(axes)
    np.testing.assert_allclose(lines["all steps"].get_ydata(), sums.max(1) / sums.mean(1))
    most = (counts.max(2) / counts.mean(2)).max(0)
    np.testing.assert_allclose(lines["steps, maximum"].get_ydata(), most)
    assert list(lines["3 : 1, the rule of thumb"].get_ydata()) == [3, 3]


def test_lines_have_gaps_where_layers_were_not_captured(partial):
    axes = figures.imbalance_by_layer(partial).axes[0]
    shown = labelled(axes)["all steps"].get_ydata()
    assert np.isnan(np.asarray(shown, float)).tolist() == [False, True, True]
    assert texts(axes.figure) == ["not captured: silent", "not captured: unsupported"]


def test_experts_of_the_worst_layer_hottest_first(profile, counts):
    sums = counts.sum(0)
    worst = (sums.max(1) / sums.mean(1)).argmax()
    figure = figures.experts_of_layer(profile)
    heights = [bar.get_height() for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert heights == sorted(sums[worst], reverse=True)
    assert f"layer {worst} " in figure.get_suptitle()
    labels = [int(label.get_text()) for label in figure.axes[0].get_xticklabels()]
    assert sums[worst][labels].tolist() == heights
    assert figure.axes[0].lines[0].get_ydata()[0] == sums[worst].mean()


def test_experts_of_a_chosen_layer(partial, counts):
    figure = figures.experts_of_layer(partial, 1)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == counts.sum(0)[1].sum()
    for layer in (0, 2, 3, 99):
        with pytest.raises(UsageError, match="no counts of this layer"):
            figures.experts_of_layer(partial, layer)


def test_overflow_curve(profile, counts):
    lines = labelled(figures.overflow_curve(profile).axes[0])
    for place, factor in enumerate((1.0, 1.25, 2.0)):
        slots = np.ceil(factor * 10 * 2 / 8)
        over = np.maximum(counts - slots, 0).sum((0, 2))
        empty = np.maximum(slots - counts, 0).sum() / (slots * counts.size)
        made = counts.sum((0, 2))
        shown = {name: line.get_ydata()[place] for name, line in lines.items()}
        assert shown == pytest.approx(
            {
                "would overflow, all layers": over.sum() / made.sum(),
                "would overflow, worst layer": (over / made).max(),
                "padding, all layers": empty,
            }
        )


def test_what_was_really_dropped_stands_beside_it(counts):
    layers = [moe(0), moe(1, drops=True), moe(2), moe(3)]
    profile = build(layers, {("decode", None): counts}, invalid={1: 30})
    line = labelled(figures.overflow_curve(profile).axes[0])["really dropped: 20.0% (layers 1)"]
    assert line.get_ydata()[0] == pytest.approx(30 / (6 * 20 + 30))


def test_timeline(profile, counts):
    above, below = figures.timeline(profile).axes
    windows = np.array([counts[:2].sum(0), counts[2:4].sum(0), counts[4:].sum(0)])
    ratios = windows.max(2) / windows.mean(2)
    lines = labelled(above)
    np.testing.assert_allclose(lines["worst layer"].get_ydata(), ratios.max(1))
    np.testing.assert_allclose(lines["median layer"].get_ydata(), np.median(ratios, 1))
    assert lines["worst layer"].get_xdata().tolist() == [0, 1, 2]
    assert below.lines[0].get_ydata().tolist() == [20, 20, 20]


def test_by_tag(profile, counts):
    lines = labelled(figures.by_tag(profile).axes[0])
    for tag, steps in {"code": counts[:4], "prose": counts[4:]}.items():
        sums = steps.sum(0)
        np.testing.assert_allclose(lines[tag].get_ydata(), sums.max(1) / sums.mean(1))


def test_by_tag_shows_the_tags_with_the_most_tokens(counts):
    steps = {("decode", f"t{n}"): counts * (9 - n) for n in range(9)}
    figure = figures.by_tag(build([moe(n) for n in range(4)], steps))
    shown = [name for name in labelled(figure.axes[0]) if name.startswith("t")]
    assert shown == [f"t{n}" for n in range(6)]
    assert "the 6 of 9 with the most tokens" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("tag", "shown"),
    [
        ("$x$", r"\$x\$"),
        ("a\x1b\n", "a��"),
        ("中文", "□□"),
        ("_x", " _x"),
        ("x" * 50, "x" * 39 + "…"),
    ],
)
def test_labels_are_taken_literally(tag, shown, counts, tmp_path):
    layers = [moe(n) for n in range(4)]
    profile = build(layers, {("decode", tag): counts}, model=ModelInfo(name=tag))
    assert next(iter(labelled(figures.by_tag(profile).axes[0]))) == shown
    figures.save(figures.by_tag(profile), tmp_path / "figure.png", "png")


def test_which_figures_there_are(profile, partial):
    every = list(figures.CAPTIONS)
    assert list(figures.figures(profile)) == every
    assert list(figures.figures(partial)) == every[:-1]
    assert list(figures.figures(build([moe(0)], {}))) == ["heatmap"]
    only_dense = build([Layer(0, "mlp", "dense")], {("decode", None): np.zeros((1, 1, 8), int)})
    assert figures.figures(only_dense) == {}
    no_factors = build([moe(0)], {("decode", None): np.full((1, 1, 8), 2)}, factors=())
    assert "overflow_curve" not in figures.figures(no_factors)


def test_files_in_every_format_and_the_same_twice(profile, tmp_path):
    kinds = ("png", "svg", "pdf")
    files = figures.write_figures(profile, tmp_path / "one", kinds)
    assert [file.name for file in files[:3]] == ["heatmap.png", "heatmap.svg", "heatmap.pdf"]
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for file in files:
        assert file.read_bytes().startswith(starts[file.suffix[1:]])
    for file in figures.write_figures(profile, tmp_path / "two", ("svg",)):
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes()
        ElementTree.fromstring(file.read_text())
        assert "<dc:date>" not in file.read_text()


def test_an_unknown_format_is_refused_before_anything_is_written(profile, tmp_path):
    with pytest.raises(UsageError, match="'gif' is not one of png, svg, pdf"):
        figures.write_figures(profile, tmp_path / "out", ("png", "gif"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [(4, 16), (61, 256), (94, 512)])
def test_tick_labels_do_not_overlap(shape):
    profile = large(*shape, steps=2) if shape[0] > 12 else _small(*shape)
    for figure in (figures.heatmap(profile), figures.imbalance_by_layer(profile)):
        figure.draw_without_rendering()
        axes = figure.axes[0]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            boxes = [
                tick.label1.get_window_extent()
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high
            ]
            pairs = pairwise(boxes)
            assert not any(Bbox.intersection(one, two) for one, two in pairs)


def _small(layers, experts):
    counts = np.random.default_rng(1).multinomial(64, np.full(experts, 1 / experts), (3, layers))
    return build([moe(n, experts) for n in range(layers)], {("decode", None): counts})


def test_works_in_threads_and_leaves_the_settings_alone(profile, tmp_path):
    import matplotlib

    before, failed = dict(matplotlib.rcParams), []

    def draw(number):
        try:
            figures.save(figures.by_tag(profile), tmp_path / f"{number}.svg", "svg")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("module", ["figures", "html"])
def test_without_matplotlib_the_error_names_the_extra(module):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from routeprof.errors import MissingExtraError\n"
        f"try: import routeprof.report.{module}\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "matplotlib is not installed; run: pip install 'routeprof[dashboard]'\n"


def test_pyplot_is_never_imported(tmp_path):
    code = "import sys, routeprof.report.html; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
