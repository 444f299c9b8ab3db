"""Figures for PNG, SVG and PDF: pure functions from a Profile to a matplotlib Figure.

Only the object-oriented API is used, so that they work without a display and in threads.
Colours can be told apart by colour-blind people; everything that is not data is drawn in INK,
which the HTML report replaces by the page's text colour.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.diagnose import HOT_IMBALANCE, layer_list
from routeprof.errors import MissingExtraError, UsageError
from routeprof.profile import Profile
from routeprof.report.summary import plain, selection
from routeprof.tables import moe_layers, tag_name
from routeprof.topology import Layer

try:
    import matplotlib
    from matplotlib import colormaps, font_manager
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.colors import Colormap, FuncNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
except ImportError as error:
    raise MissingExtraError("matplotlib", "dashboard") from error

INK = "#24292e"
GREY = "#8c959f"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = "osD^vP"
MOST_TICKS = 32
FORMATS = ("png", "svg", "pdf")
CAPTIONS = {
    "heatmap": "Assignments of each expert ÷ mean of its layer, over all steps. White is "
    "the mean, red is above it, blue below; the darkest blue had almost none, or none. Hatched "
    "layers were not captured.",
    "imbalance_by_layer": "Load of the hottest expert ÷ mean load: over all steps "
    "(dots), and within single steps, weighted by tokens (bar: median to 95th percentile; "
    "tick: maximum).",
    "experts_of_layer": "Assignments of the experts of the most imbalanced layer, hottest first.",
    "overflow_curve": "Share of assignments above capacity factor × mean load in their step, and "
    "share of expert slots that would stay empty. Engines without a capacity drop nothing.",
    "timeline": "Load of the hottest expert ÷ mean load in each window, for the worst and the "
    "median layer, and tokens per second.",
    "by_tag": "Load of the hottest expert ÷ mean load for each tag. Where the lines differ, the "
    "imbalance depends on the data.",
}
_NO_DATE: dict[str, dict[str, Any]] = {
    "svg": {"Creator": None, "Date": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
_saving = threading.Lock()

LoadArray = np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]


def figures(profile: Profile) -> dict[str, Figure]:
    """Every figure that the recording has numbers for, by name."""
    drawn = {"heatmap": heatmap(profile)} if moe_layers(profile) else {}
    if profile.layers()["imbalance_ratio"].notna().any():
        drawn["imbalance_by_layer"] = imbalance_by_layer(profile)
        drawn["experts_of_layer"] = experts_of_layer(profile)
        if profile.info.capacity_factors:
            drawn["overflow_curve"] = overflow_curve(profile)
        if len(profile.totals.windows.window):
            drawn["timeline"] = timeline(profile)
        if set(profile.tags) - {None}:
            drawn["by_tag"] = by_tag(profile)
    return drawn


def write_figures(
    profile: Profile, directory: str | Path, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Write every figure in every format (png, svg, pdf); returns the files.

    Raises:
        UsageError: an unknown format.
    """
    if unknown := set(formats) - set(FORMATS):
        raise UsageError(f"figure format {min(unknown)!r} is not one of {', '.join(FORMATS)}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures(profile).items():
        wide = int(figure.get_figwidth() * 16)
        figure.supxlabel(fill(CAPTIONS[name], wide), x=0.01, ha="left", color=INK, fontsize=8)
        # Laid out once: a second layout starts from the first, and ends elsewhere.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for kind in formats:
            files.append(folder / f"{name}.{kind}")
            save(figure, files[-1], kind)
    return files


def save(figure: Figure, target: Path | IO[str], kind: str, *, text: bool = False) -> None:
    """Save one figure; what is drawn and laid out alike gives the same bytes.

    Args:
        text: keep text in an SVG as text rather than as outlines.
    """
    settings: Any = {"svg.hashsalt": "routeprof", "svg.fonttype": "none" if text else "path"}
    # The settings are global to the process.
    with _saving, matplotlib.rc_context(settings):
        figure.savefig(target, format=kind, dpi=150, transparent=text, metadata=_NO_DATE[kind])


# -- the figures


def heatmap(profile: Profile) -> Figure:
    """Load of every expert of every layer, as a multiple of the layer's mean."""
    load, layers = load_over_mean(profile), moe_layers(profile)
    rows, experts = load.shape
    figure = _figure(profile, "Load of every expert", height=min(max(3.6, 2.2 + 0.13 * rows), 13.0))
    axes = _axes(figure, "expert", "layer")
    with np.errstate(divide="ignore"):
        logs = np.abs(np.log2(load[load > 0].compressed()))
    reach = int(np.clip(np.ceil(logs.max(initial=1.0)), 1, 3))
    image = axes.imshow(
        load,
        cmap=_diverging(),
        norm=FuncNorm((_log2, np.exp2), vmin=2.0**-reach, vmax=2.0**reach),
        aspect="auto",
        interpolation="none",
    )
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    _layer_ticks(axes.yaxis, layers)
    for first, count, state in _gaps(profile):
        axes.add_patch(Rectangle((-0.5, first - 0.5), experts, count, **_HATCHED))
        _note(axes, experts / 2 - 0.5, first + count / 2 - 0.5, f"not captured: {state}")
    powers = range(-reach, reach + 1)
    style: dict[str, Any] = {"extend": "both", "fraction": 0.04, "pad": 0.02, "aspect": 30}
    bar = figure.colorbar(image, ax=axes, ticks=[2.0**n for n in powers], **style)
    bar.outline.set_visible(False)
    bar.ax.set_yticklabels([f"1/{2**-n}" if n < 0 else str(2**n) for n in powers])
    bar.set_label("load ÷ mean (log scale)", color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    return figure


def load_over_mean(profile: Profile) -> LoadArray:
    """Load ÷ mean, [MoE layers, experts]; masked where nothing was captured."""
    layers = moe_layers(profile)
    widest = max((layer.experts for _, layer in layers), default=1) or 1
    shape = (len(layers), widest)
    load: LoadArray = np.ma.MaskedArray(np.zeros(shape), mask=np.ones(shape, dtype=bool))
    counts = profile.totals.lists["counts"].sum(0)
    for row, (position, layer) in enumerate(layers):
        own = counts[position, : layer.experts]
        if profile.states[position] == "captured" and own.sum():
            load[row, : len(own)] = own / own.mean()
    return load


def imbalance_by_layer(profile: Profile) -> Figure:
    """Aggregate and step imbalance of every layer."""
    table = profile.layers()
    place = np.arange(len(table))
    p50, p95, most = (table[f"step_imbalance_{name}"] for name in ("p50", "p95", "max"))
    figure = _figure(profile, "Imbalance by layer")
    axes = _axes(figure, "layer", "imbalance_ratio (max ÷ mean)")
    thick = max(1.5, min(10.0, 300 / len(table)))
    axes.vlines(place, p50, p95, GREY, lw=thick, alpha=0.6, label="steps, p50 to p95")
    axes.plot(place, most, "_", color=GREY, ms=thick + 2, label="steps, maximum")
    axes.plot(
        place, table["imbalance_ratio"], "o-", color=COLOURS[0], ms=4, lw=1, label="all steps"
    )
    _imbalance_axis(axes, float(most.max()))
    _layer_ticks(axes.xaxis, moe_layers(profile))
    _hatch_columns(axes, profile)
    _legend(axes)
    return figure


def experts_of_layer(profile: Profile, layer: int | None = None) -> Figure:
    """Experts of one layer, hottest first.

    Args:
        layer: its index; the most imbalanced one by default.

    Raises:
        UsageError: the layer was not captured, or none was.
    """
    table = profile.layers().dropna(subset="imbalance_ratio")
    ratios = dict(zip(table["layer"].to_list(), table["imbalance_ratio"].to_list(), strict=True))
    if not ratios or (layer is not None and layer not in ratios):
        raise UsageError("there are no counts of this layer; see the findings for the reason")
    chosen = max(ratios, key=lambda index: ratios[index]) if layer is None else layer
    position, own = next(item for item in moe_layers(profile) if item[1].index == chosen)
    counts = profile.totals.lists["counts"].sum(0)[position, : own.experts]
    order = np.argsort(-counts, kind="stable")
    few = own.experts <= MOST_TICKS
    across = "expert" if few else f"rank of the expert (hottest: {', '.join(map(str, order[:5]))})"
    figure = _figure(profile, f"Experts of layer {chosen}")
    axes = _axes(figure, across, "assignments")
    axes.bar(np.arange(own.experts), counts[order], 0.8 if few else 1.0, color=COLOURS[0])
    label = f"mean {counts.mean():,.1f}; imbalance_ratio (max ÷ mean) {ratios[chosen]:.2f}"
    axes.axhline(counts.mean(), color=COLOURS[1], ls="--", label=label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.01)
    if few:
        axes.set_xticks(np.arange(own.experts), [str(expert) for expert in order])
    _legend(axes)
    return figure


def overflow_curve(profile: Profile) -> Figure:
    """What would overflow, and stay empty, at each capacity factor."""
    table, moe = profile.overflow(), dict(moe_layers(profile))
    kept = [n for n in profile.captured if n in moe]
    over, slots = (profile.totals.lists[n].sum(0)[kept] for n in ("overflow", "capacity_slots"))
    counts, tokens = profile.totals.lists["counts"].sum(0)[kept], profile.totals.sums["tokens"]
    made = float(tokens.sum(0)[kept] @ np.array([moe[n].top_k for n in kept]))
    factors = np.array(profile.info.capacity_factors)
    padding = 1 - (counts.sum() - over.sum(0)) / slots.sum(0)
    worst = table.groupby("capacity_factor")["overflow_rate"].max().reindex(factors)
    figure = _figure(profile, "Overflow by capacity factor")
    axes = _axes(figure, "capacity factor", "share")
    axes.plot(
        factors, over.sum(0) / made, "o-", color=COLOURS[1], label="would overflow, all layers"
    )
    axes.plot(factors, worst, "^:", color=COLOURS[1], label="would overflow, worst layer")
    axes.plot(factors, padding, "s--", color=COLOURS[0], label="padding, all layers")
    dropping = [n for n in kept if moe[n].drops]
    if dropping:
        lost = profile.totals.sums["invalid"].sum(0)[dropping].sum()
        all_made = tokens.sum(0)[dropping] @ np.array([moe[n].top_k for n in dropping])
        names = layer_list(moe[n].index for n in dropping)
        label = f"really dropped: {lost / all_made:.1%} (layers {names})"
        axes.axhline(lost / all_made, color=COLOURS[2], lw=2, label=label)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def timeline(profile: Profile) -> Figure:
    """Imbalance and tokens per second over the time of the recording."""
    windows = profile.windows()
    seconds, binned = _binned(windows)
    tokens = (
        windows.groupby([binned, "phase", "tag", "window"])["tokens"].max().groupby(level=0).sum()
    )
    weighted = windows.assign(sum=windows["imbalance_ratio"] * windows["tokens"])
    sums = weighted.dropna(subset="sum").groupby([binned, "layer"])[["sum", "tokens"]].sum()
    ratios = (sums["sum"] / sums["tokens"]).groupby(level=0)
    figure = _figure(profile, "Timeline", height=4.5)
    above = _axes(figure, "", "imbalance_ratio", 211)
    above.tick_params(labelbottom=False)
    style: dict[str, Any] = {"ms": 3, "lw": 1}
    time = ratios.median().index.to_numpy() * seconds
    above.plot(time, ratios.max(), "^-", color=COLOURS[1], label="worst layer", **style)
    above.plot(time, ratios.median(), "o-", color=COLOURS[0], label="median layer", **style)
    _imbalance_axis(above, float(ratios.max().max()))
    lasted = (windows["end"] - windows["start"]).groupby(binned).max().clip(lower=seconds)
    below = _axes(figure, "seconds since the first window", "tokens per second", 212)
    at = tokens.index.to_numpy() * seconds
    below.plot(at, tokens / lasted, "o-", color=COLOURS[2], **style)
    below.set_ylim(bottom=0)
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.sharex(above)
    _legend(above)
    return figure


def _binned(windows: pd.DataFrame) -> tuple[float, pd.Series[Any]]:
    """Width of a bin in seconds, and the bin of each row: windows of several ranks overlap."""
    lasted = windows["end"] - windows["start"]
    since = windows["start"] - windows["start"].min()
    seconds = max(float(lasted.median()), float(since.max()) / 400, 1e-3)
    return seconds, (since / seconds).astype(int).rename("bin")


def by_tag(profile: Profile) -> Figure:
    """Imbalance of every layer for each tag, those with the most tokens first."""
    parts = {tag_name(tag): profile.select(tag=tag_name(tag)).layers() for tag in profile.tags}
    ordered = sorted(parts, key=lambda name: -float(parts[name]["tokens"].fillna(0).max()))
    some = f", the {len(COLOURS)} of {len(parts)} with the most tokens"
    figure = _figure(profile, "Imbalance by tag" + (some if len(parts) > len(COLOURS) else ""))
    axes = _axes(figure, "layer", "imbalance_ratio (max ÷ mean)")
    for tag, colour, marker in zip(ordered, COLOURS, MARKERS, strict=False):
        ratios = parts[tag]["imbalance_ratio"]
        style: dict[str, Any] = {"color": colour, "marker": marker, "ms": 4, "lw": 1}
        axes.plot(np.arange(len(ratios)), ratios, label=literal(tag), **style)
    most = max(float(parts[tag]["imbalance_ratio"].max()) for tag in ordered)
    _imbalance_axis(axes, most)
    _layer_ticks(axes.xaxis, moe_layers(profile))
    _hatch_columns(axes, profile)
    _legend(axes)
    return figure


# -- what the figures share


_HATCHED: dict[str, Any] = {
    "facecolor": "#d8dee4",
    "edgecolor": GREY,
    "hatch": "////",
    "linewidth": 0,
}


def _figure(profile: Profile, title: str, height: float = 3.8) -> Figure:
    """An empty figure whose title says what is shown of which model."""
    about = [profile.info.model.name, *selection(profile)]
    said = " · ".join([title, *(literal(text, 60) for text in about if text)])
    figure = Figure(figsize=(9.0, height), layout="constrained")
    figure.suptitle(said, x=0.01, ha="left", color=INK, fontsize=11)
    return figure


def _axes(figure: Figure, across: str, up: str, place: int = 111) -> Axes:
    axes = figure.add_subplot(place)
    axes.set_xlabel(across, color=INK, fontsize=9)
    axes.set_ylabel(up, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.patch.set_alpha(0)
    return axes


def _legend(axes: Axes) -> None:
    """A legend above the axes, where it hides nothing."""
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK, "ncols": 4}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, **style)


def _imbalance_axis(axes: Axes, most: float) -> None:
    """From 1 upwards, logarithmic where one layer would flatten the others; the 3 : 1 line."""
    axes.axhline(HOT_IMBALANCE, color=INK, ls=":", lw=1, label="3 : 1, the rule of thumb")
    if most > 10:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(bottom=0.9)
    axes.grid(axis="y", color=GREY, alpha=0.3, lw=0.5)


def _layer_ticks(axis: XAxis | YAxis, layers: Sequence[tuple[int, Layer]]) -> None:
    """Every layer's index, or every n-th where they would overlap."""
    step = -(-len(layers) // MOST_TICKS)
    places = range(0, len(layers), max(step, 1))
    axis.set_ticks(places, [str(layers[place][1].index) for place in places])


def _gaps(profile: Profile) -> list[tuple[int, int, str]]:
    """Runs of MoE layers that were not captured: first row, how many, state."""
    states = [profile.states[position] for position, _ in moe_layers(profile)]
    gaps, row = [], 0
    for state, run in groupby(states):
        count = len(list(run))
        if state != "captured":
            gaps.append((row, count, str(state)))
        row += count
    return gaps


def _hatch_columns(axes: Axes, profile: Profile) -> None:
    axes.set_xlim(-0.5, max(len(moe_layers(profile)), 1) - 0.5)
    across = axes.get_xaxis_transform()
    for first, count, state in _gaps(profile):
        axes.add_patch(Rectangle((first - 0.5, 0), count, 1, transform=across, **_HATCHED))
        where = first + (count - 1) / 2
        _note(axes, where, 0.5, f"not captured: {state}", transform=across, rotation=90)


def _note(axes: Axes, x: float, y: float, text: str, **other: Any) -> None:
    paper: dict[str, Any] = {"facecolor": "#eaeef2", "edgecolor": "none", "pad": 0.6}
    style: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": 6.5,
        "color": "#1f2328",
        "bbox": paper,
    }
    axes.text(x, y, text, **style, **other)


def _log2(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 that puts 0, an expert without tokens, below every scale."""
    return np.log2(np.maximum(values, 1e-9))


def _diverging() -> Colormap:
    return colormaps["RdBu_r"].with_extremes(under="#021b38", over="#3f0010", bad="none")


def literal(text: object, most: int = 40) -> str:
    """A user's text as a label: no mathematics, only characters that the font has."""
    known = "".join(char if _has_glyph(char) else "□" for char in plain(text))
    short = known if len(known) <= most else known[: most - 1] + "…"
    # A label that begins with an underscore is left out of the legend.
    return (" " + short if short.startswith("_") else short).replace("$", r"\$")


@cache
def _has_glyph(char: str) -> bool:
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return bool(font.get_char_index(ord(char)))
