"""What the memory plan says, in words and cells, for the terminal and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isnan
from typing import TYPE_CHECKING

from routeprof.plan.parameters import Part, by_part, total
from routeprof.plan.precision import FORMATS
from routeprof.report.summary import NONE, Column, plain, share, size

if TYPE_CHECKING:
    from routeprof.plan.memory import Plan, Split

PART_NAMES: dict[Part, str] = {
    "attention": "attention",
    "state": "Mamba and linear attention",
    "shared_experts": "shared experts",
    "routed_experts": "routed experts",
    "embeddings": "embeddings",
    "other": "other",
}
HOW = (
    "bytes are of the fullest GPU; GPUs of one replica share all but the routed experts, of which "
    "each expert-parallel rank holds its own"
)
HELD = (
    "held back is the larger of the reserve and of activations, all-to-all buffers, runtime and "
    "CUDA graphs"
)


def billions(numbers: int) -> str:
    """Parameters, in the unit that people use."""
    return f"{numbers / 1e9:,.2f} B" if numbers >= 1e8 else f"{numbers / 1e6:,.3f} M"


def facts(made: Plan) -> Iterator[tuple[str, str]]:
    """What stands above the table: names and values."""
    model, setting = made.model, made.setting
    yield "model", f"{plain(model.name)} ({plain(model.family)}), {layers_text(made)}"
    active = NONE if model.active is None else billions(model.active)
    yield (
        "parameters",
        f"{billions(total(model.weights))}, {active} active",
    )
    decimal = f" ({made.weights_bytes / 1e9:,.0f} GB)" if made.weights_bytes >= 1e9 else ""
    yield "weights", f"{size(made.weights_bytes)}{decimal}, {dtypes(made)}"
    if made.cache is None:
        yield "a sequence", f"cache of {setting.length:,} tokens: not known"
    else:
        kv, state = size(made.cache.kv), size(made.cache.state)
        grows = f"{kv} of keys and values ({setting.precision.cache})"
        fixed = f", {state} of fixed state" if made.cache.state else ""
        yield "a sequence", f"of {setting.length:,} tokens: {grows}{fixed}"
    nodes = f" on {made.nodes} nodes" if made.nodes > 1 else ""
    yield "GPUs", f"{made.gpus}{nodes}, {size(setting.memory)} each"
    yield (
        "held back",
        (
            f"{share(setting.reserve)}, or {size(setting.runtime + setting.graphs)} for runtime, "
            f"CUDA graphs and what {setting.step_tokens:,} tokens need, if that is more"
        ),
    )
    yield "loads", loads_text(made)


def layers_text(made: Plan) -> str:
    """How many layers there are, and of what kinds."""
    shape, kept, routing = made.model.shape, made.model.kept, len(made.model.moes)
    if shape is None:
        parts = [f"{routing} MoE layers"]
    else:
        parts = [f"{len(shape.layers)} layers", f"{routing} route" if routing else ""]
    if kept is not None:
        kv = len({one.layer for one in kept if one.kind == "kv"})
        fixed = len({one.layer for one in kept if one.kind != "kv"})
        parts += [f"{kv} hold keys and values", f"{fixed} hold a fixed state" if fixed else ""]
    return ", ".join(part for part in parts if part)


def dtypes(made: Plan) -> str:
    """Data types of the parts that differ."""
    precision = made.setting.precision
    told = {
        "attention": precision.attention,
        "routed experts": precision.routed_experts,
        "embeddings": precision.embeddings or precision.small,
    }
    others = [
        f"{part} {name}" for part, name in told.items() if name not in ("", precision.weights)
    ]
    if precision.hot and precision.hot_experts:
        others.append(f"the hottest {share(precision.hot_experts)} of experts {precision.hot}")
    return ", ".join([precision.weights, *others])


def loads_text(made: Plan) -> str:
    """Where the loads of experts come from."""
    if not made.model.moes:
        return "a dense model: nothing is routed"
    if made.measured is None:
        return "experts are taken to be loaded evenly; --recording takes them as measured"
    ranks = max(row.layout.ep for row in made.splits)
    worst = max(made.measured.fullest(ranks))
    text = f"as recorded: the fullest of {ranks} ranks gets up to {worst:.2f} x the mean"
    precision = made.setting.precision
    if not precision.hot:
        return text
    hot = made.measured.hot_share(precision.hot_experts)
    return f"{text}; the hot experts get {share(hot)} of the assignments"


def formats_text(made: Plan) -> list[str]:
    """What each data type with scales means."""
    precision = made.setting.precision
    used = {precision.weights, precision.attention, precision.routed_experts, precision.hot}
    return [
        f"{name} is {FORMATS[name].bytes:.4g} B a number: {FORMATS[name].means}"
        for name in FORMATS
        if name in used and FORMATS[name].group
    ]


def parts_rows(made: Plan) -> list[tuple[str, str, str, str]]:
    """Parts of the whole model: name, parameters, bytes and their share."""
    numbers = by_part(made.model.weights)
    whole = made.weights_bytes
    return [
        (PART_NAMES[part], billions(numbers[part]), size(bytes_), share(bytes_ / whole))
        for part, bytes_ in made.weights.items()
        if numbers[part]
    ]


def verdict(made: Plan) -> str:
    """The answer in one line."""
    fitting = [row for row in made.splits if row.fits]
    if fitting:
        best = fitting[0]
        return (
            f"{len(fitting)} of {len(made.splits)} layouts fit; {best.layout} holds the most: "
            f"{best.sequences:,} sequences of {made.setting.length:,} tokens"
        )
    if any(row.fits is None for row in made.splits):
        return "the weights fit; whether a pass and the cache do, too, is not known for this family"
    running = [row for row in made.splits if not row.why] or list(made.splits)
    least = min(running, key=lambda row: row.weights_bytes + row.cache_bytes + row.held_back)
    short = least.weights_bytes + least.cache_bytes + least.held_back - made.setting.memory
    if least.why:
        return f"no layout can run: {least.why}"
    return (
        f"nothing fits: {least.layout} comes closest and lacks {size(short)} on each GPU "
        f"(weights {size(least.weights_bytes)}, cache {size(least.cache_bytes)}, held back "
        f"{size(least.held_back)} of {size(made.setting.memory)})"
    )


def hottest_rows(made: Plan) -> list[tuple[str, str, str, str]]:
    """The hottest experts: layer, expert, share of its layer and load ÷ mean."""
    if made.measured is None:
        return []
    return [
        (str(one.layer), str(one.expert), share(one.share), f"{one.over_mean:.2f}")
        for one in made.measured.hottest()
    ]


# -- the table of layouts


def known_size(value: float) -> str:
    """Bytes, or that they are not known; a minus where they are lacking."""
    if isnan(value):
        return NONE
    return f"-{size(-value)}" if value < 0 else size(value)


def fits_text(row: Split) -> str:
    """Yes, no, or that it is not known."""
    return NONE if row.fits is None else "yes" if row.fits else "no"


def columns(made: Plan) -> list[tuple[Column, Callable[[Split], str]]]:
    """Columns of the table, those without anything left out."""
    shown: list[tuple[Column, Callable[[Split], str]]] = [
        (_column("layout", ("", "attention"), 0), lambda row: str(row.layout).split(", ")[0]),
        (_column("fits", ("", "fits"), 0), fits_text),
        (_column("sequences", ("max", "sequences"), 0), _sequences),
        (_column("weights", ("weights", "per GPU"), 0), lambda row: known_size(row.weights_bytes)),
        (_column("free", ("left for", "cache"), 1), lambda row: known_size(row.free)),
        (_column("held", ("held", "back"), 2), lambda row: known_size(row.held_back)),
    ]
    if made.model.moes:
        experts = _column("experts", ("", "experts"), 0)
        shown.insert(1, (experts, lambda row: str(row.layout).split(", ")[1]))
    for rank, part in enumerate(PART_NAMES, 6):
        if made.weights[part]:
            heading = HEADINGS[part]
            shown.append((_column(part, heading, rank), _part(part)))
    shown += [
        (_column("kv", ("KV of", "the batch"), 3), lambda row: known_size(row.kv)),
        (_column("activations", ("", "activations"), 4), lambda row: known_size(row.activations)),
    ]
    if made.cache is not None and made.cache.state:
        shown.append((_column("state", ("", "state"), 3), lambda row: known_size(row.state)))
    if any(row.dispatch for row in made.splits):
        shown += [
            (_column("dispatch", ("", "dispatch"), 5), lambda row: known_size(row.dispatch)),
            (_column("combine", ("", "combine"), 5), lambda row: known_size(row.combine)),
        ]
    return shown


def _part(part: Part) -> Callable[[Split], str]:
    return lambda row: known_size(row.weights[part])


def _column(name: str, heading: tuple[str, str], rank: int) -> Column:
    return Column(name, heading, str, rank, "")


def _sequences(row: Split) -> str:
    return NONE if row.sequences is None else f"{row.sequences:,}"


HEADINGS: dict[Part, tuple[str, str]] = {
    "attention": ("attention", "weights"),
    "state": ("state", "weights"),
    "shared_experts": ("shared", "experts"),
    "routed_experts": ("routed", "experts"),
    "embeddings": ("", "embeddings"),
    "other": ("other", "weights"),
}


def obstacles(made: Plan) -> list[str]:
    """Why layouts cannot run, each reason once."""
    return list(dict.fromkeys(row.why for row in made.splits if row.why))


def spanning(made: Plan) -> str:
    """Whether layouts share attention or an expert between nodes."""
    count = sum(row.spans_nodes for row in made.splits)
    return (
        f"{count} layouts share attention or experts between nodes, which is slow" if count else ""
    )
