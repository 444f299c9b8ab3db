"""``routeprof whatif batching`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from routeprof.report.summary import NONE, json_data, plain, share, whole
from routeprof.report.text import plain_table

if TYPE_CHECKING:
    from routeprof.whatif.batching import Batching, PolicyFigures
    from routeprof.whatif.requests.gain import Gain
    from routeprof.whatif.requests.signatures import Signature, Signatures

POLICIES = {"fifo": "FIFO", "random": "random", "load_aware": "load-aware"}
KNOWN_BY = {
    "tag": "load-aware: knows a request's tag, and the routing of others with that tag",
    "prefill": "load-aware: knows how a request's own prefill was routed",
    None: "load-aware: –; nothing tells requests apart before they run: tag them by kind",
}
VERDICTS = {
    "gain": "better",
    "loss": "worse",
    "none shown": "no gain shown",
    "unknown": "too few requests to say",
}


def batching_json(made: Batching, asked: dict[str, Any]) -> dict[str, Any]:
    """All figures, for JSON.

    Args:
        asked: what to repeat of the question.
    """
    data: dict[str, Any] = {
        **asked,
        "phase": made.phase,
        "ranks": made.ranks,
        "known_by": made.known_by,
        "requests": made.requests,
        "requests_left_out": made.left_out,
        "layers_left_out": made.blind,
        "rows": [_row(one) for one in made.policies],
        "signatures": {
            "divergence_within": made.signatures.within,
            "divergence_between": made.signatures.between,
            "classes": [_class(one) for one in made.signatures.classes],
        },
    }
    plain_data: dict[str, Any] = json_data(data)
    return plain_data


def signatures_json(made: Signatures, asked: dict[str, Any]) -> dict[str, Any]:
    """Signatures with their arrays: ``shares`` by class, layer and expert."""
    data = {
        **asked,
        "phase": made.phase,
        "layers": made.layers,
        "classes": [
            {**_class(one), "shares": [layer.tolist() for layer in one.shares]}
            for one in made.classes
        ],
    }
    plain_data: dict[str, Any] = json_data(data)
    return plain_data


def print_batching(made: Batching, console: Console) -> None:
    """The same as text."""
    for part in _lines(made):
        console.print(part, highlight=False)


def _row(one: PolicyFigures) -> dict[str, Any]:
    gains = None if one.gains is None else {name: _gain(gain) for name, gain in one.gains.items()}
    return {**asdict(one), "gains": gains}


def _gain(gain: Gain) -> dict[str, Any]:
    return {**asdict(gain), "verdict": gain.verdict}


def _class(one: Signature) -> dict[str, Any]:
    return {
        "class": one.name,
        "requests": one.requests,
        "tokens_per_request": one.tokens,
        "divergence_within": one.within,
        "top_experts": [
            {"layer": layer, "expert": expert, "share": part} for layer, expert, part in one.top
        ],
    }


def _lines(made: Batching) -> Iterator[RenderableType]:
    steps = "one token of each request in a step" if made.phase == "decode" else "a batch is a step"
    yield f"{made.phase} in batches, {steps}"
    yield f"{made.requests:,} requests; experts in order on {made.ranks} ranks\n"
    yield _figures(made)
    yield "\ngain: FIFO's figure ÷ the policy's, with its 95 % interval; 1 is none\n"
    yield _gains(made)
    yield ""
    yield KNOWN_BY[made.known_by]
    if any(one.gains is None for one in made.policies if one.policy != "fifo"):
        yield "no gain where there is one batch to fill: every order is the same"
    yield from _left_out(made)
    yield "\nrouting signatures: mean shares of load, the largest as layer:expert\n"
    yield _classes(made.signatures)
    yield "\nJensen–Shannon divergence of two requests: " + ", ".join(
        f"{_number(value)} {where}"
        for value, where in (
            (made.signatures.within, "within a class"),
            (made.signatures.between, "between classes"),
        )
    )


def _left_out(made: Batching) -> Iterator[str]:
    if made.left_out:
        yield f"left out: {made.left_out:,} requests without some of their {made.phase} tokens"
    if made.blind:
        layers = ", ".join(str(index) for index in made.blind)
        yield f"left out: layers {layers}, which do not know whose their tokens are"


def _figures(made: Batching) -> Table:
    table = _table("batch", "policy", ["batches", "imbalance", "straggler", "tokens/expert"])
    for heading in ("median", "GEMM<16"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in made.policies:
        table.add_row(
            str(one.batch_size),
            POLICIES[one.policy],
            whole(one.batches),
            _number(one.imbalance_ratio),
            _number(one.straggler_factor),
            _number(one.tokens_per_expert_mean),
            NONE if isnan(one.tokens_per_expert_median) else f"{one.tokens_per_expert_median:g}",
            share(one.small_gemm_share),
        )
    return table


def _gains(made: Batching) -> Table:
    table = _table("batch", "policy", ["imbalance", "straggler"])
    table.add_column("straggler in words")
    for one in made.policies:
        if one.gains is not None:
            straggler = one.gains["straggler_factor"]
            table.add_row(
                str(one.batch_size),
                POLICIES[one.policy],
                _interval(one.gains["imbalance_ratio"]),
                _interval(straggler),
                VERDICTS[straggler.verdict],
            )
    return table


def _classes(made: Signatures) -> Table:
    table = plain_table()
    table.add_column("class", overflow="fold")
    for heading in ("requests", "tokens each", "divergence"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("largest shares", no_wrap=True)
    for one in made.classes:
        top = "  ".join(f"{layer}:{expert} {part:.0%}" for layer, expert, part in one.top)
        table.add_row(
            plain(one.name), whole(one.requests), f"{one.tokens:,.1f}", _number(one.within), top
        )
    return table


def _table(first: str, second: str, numbers: list[str]) -> Table:
    table = plain_table()
    table.add_column(first, justify="right", no_wrap=True)
    table.add_column(second, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _interval(gain: Gain) -> str:
    if isnan(gain.lower):
        return _number(gain.value)
    return f"{gain.value:.3f} ({gain.lower:.3f} to {gain.upper:.3f})"


def _number(value: float) -> str:
    return NONE if isnan(value) else f"{value:.3f}"
