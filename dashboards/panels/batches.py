"""What batches composed otherwise would bring: computed where the reader asks for it."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import told
from routeprof.dashboards.figures.batching import Intervals, gain_points
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.panels.command_line import command_line, sentence
from routeprof.dashboards.panels.key_groups import tag_and_time
from routeprof.dashboards.panels.token_rows import NEEDED, has_tokens
from routeprof.dashboards.view import Context, Filled, Panel
from routeprof.errors import RouteprofError
from routeprof.profile import Profile
from routeprof.rank_loads import usual_ranks
from routeprof.report.whatif_batching import POLICIES, VERDICTS
from routeprof.whatif.batching import Batching, PolicyFigures, compare_requests
from routeprof.whatif.requests.gain import FEWEST_REQUESTS, Gain
from routeprof.whatif.requests.served import Requests, served_requests

PANEL = Panel(
    "batching",
    "What mixed batches would bring",
    "Chart of points with intervals: gain over batches in the order of arrival of random and of "
    "load-aware ones, in straggler factor and imbalance ratio",
    height=320,
)

MOST_TOKENS = 2_000_000
"""Tokens times layers that a page still composes batches of."""

MOST_FITS = 1_000_000_000
"""(request, batch, expert) triples that load-aware composition may try."""

COLUMNS = (
    "policy batch_straggler straggler_gain straggler_gain_low straggler_gain_high "
    "straggler_verdict batch_imbalance imbalance_gain imbalance_gain_low imbalance_gain_high "
    "imbalance_verdict batch_requests batches batch_steps gemm_mean_tokens gemm_median_tokens "
    "small_gemm_share"
).split()

UNASKED = (
    "Made where it is asked for: choose “Batch size” in the dashboard, or run routeprof whatif "
    "batching."
)
TOO_MUCH = (
    "This selection has more tokens or requests than a page can compose batches of: narrow it, or "
    "use the command below."
)
NO_CHOICE = "There is one batch to fill: every order is the same, and nothing can be gained."

_FIGURES = {"straggler_factor": "straggler factor", "imbalance_ratio": "imbalance ratio"}
_KNOWS = {
    "tag": "Load-aware knows the requests' tags{length}. Held out: it is fitted on half of each "
    "tag's requests and judged on the others, then the other way round.",
    "prefill": "Load-aware knows how each request's own prefill was routed; it is judged on the "
    "decode.",
    None: "No load-aware ones: nothing tells these requests apart before they run. Tag them by "
    "kind.",
}


def batching(context: Context) -> Filled:
    """What random and load-aware batches gain over those in the order of arrival."""
    found = _found(context)
    if isinstance(found, str):
        return Filled(blank(found, context.scheme), "", pd.DataFrame(columns=COLUMNS))
    table = pd.DataFrame([_row(one) for one in found.policies], columns=COLUMNS)
    caption = _caption(context, found)
    others = [one for one in found.policies if one.gains is not None]
    if not others:
        return Filled(blank(NO_CHOICE, context.scheme), caption, table)
    series = {label: _intervals(found, others, name) for name, label in _FIGURES.items()}
    names = [POLICIES[one.policy] for one in others]
    return Filled(gain_points(names, series, context.scheme), caption, table)


def commands(context: Context) -> list[Any]:
    """How to have the same from the command line, where that can answer."""
    found = _found(context)
    if isinstance(found, str) and found != TOO_MUCH:
        return []
    ranks, _ = usual_ranks(context.whole)
    options = {"batch-sizes": context.state.batch, "ranks": ranks, "phase": _phase(context)}
    text = (
        "The same from the command line, also of several batch sizes, and what each tag's requests "
        "choose, for a scheduler to use (--signatures)."
    )
    return [told("To compose such batches", text, command_line(context, "batching", **options))]


def _phase(context: Context) -> str:
    """Batches are of one phase."""
    return "prefill" if context.state.phase == "prefill" else "decode"


def _found(context: Context) -> Batching | str:
    """The compositions, or one line that says why there are none."""
    size = context.state.batch
    if size is None:
        return UNASKED
    ranks, _ = usual_ranks(context.whole)
    return context.once(("batching", size), lambda: _compared(context, size, ranks))


def _compared(context: Context, size: int, ranks: int) -> Batching | str:
    profile = _all_phases(context)
    if not has_tokens(profile):
        return NEEDED
    if int(profile.totals.sums["tokens"].sum()) > MOST_TOKENS:
        return TOO_MUCH
    try:
        requests = served_requests(profile, _phase(context))
        if fits(requests, size) > MOST_FITS:
            return TOO_MUCH
        return compare_requests(requests, [size], ranks=ranks)
    except RouteprofError as error:
        return sentence(error)


def _all_phases(context: Context) -> Profile:
    """The selected tag and time: what a decode will be like its prefill may tell."""
    if context.state.phase is None:
        return context.profile
    return context.all_tags.narrowed(None, context.state.tag)


def fits(requests: Requests, size: int) -> int:
    """(request, batch, expert) triples that load-aware composition tries."""
    experts = sum(one.layer.experts for one in requests.layers)
    return len(requests.names) ** 2 // size * experts


# -- what is shown of them


def _row(one: PolicyFigures) -> tuple[object, ...]:
    return (
        POLICIES[one.policy],
        one.straggler_factor,
        *_gained(one, "straggler_factor"),
        one.imbalance_ratio,
        *_gained(one, "imbalance_ratio"),
        one.requests,
        one.batches,
        one.steps,
        one.tokens_per_expert_mean,
        one.tokens_per_expert_median,
        one.small_gemm_share,
    )


def _gained(one: PolicyFigures, name: str) -> tuple[float, float, float, str | None]:
    if one.gains is None:
        return nan, nan, nan, None
    gain = one.gains[name]
    return gain.value, gain.lower, gain.upper, VERDICTS[gain.verdict]


def _intervals(made: Batching, others: list[PolicyFigures], name: str) -> Intervals:
    gains = [one.gains[name] for one in others if one.gains is not None]
    first = getattr(made.policies[0], name)
    return Intervals(
        np.array([gain.value for gain in gains]),
        np.array([gain.lower for gain in gains]),
        np.array([gain.upper for gain in gains]),
        [
            f"{POLICIES[one.policy]}: {_FIGURES[name]} {formats.ratio(getattr(one, name))}, FIFO's "
            f"{formats.ratio(first)}<br>gain {_told(gain)}"
            for one, gain in zip(others, gains, strict=True)
        ],
    )


def _told(gain: Gain) -> str:
    value = f"{gain.value:.3f}" if formats.known(gain.value) else formats.NOTHING
    known = formats.known(gain.lower)
    interval = f" ({gain.lower:.3f} to {gain.upper:.3f})" if known else ""
    return f"{value}{interval}, {VERDICTS[gain.verdict]}"


def _caption(context: Context, made: Batching) -> str:
    phase, size = made.phase, made.policies[0].batch_size
    used = made.policies[0].requests
    whole = f"{used:,}" if used == made.requests else f"{used:,} of {made.requests:,}"
    interval = ", with its 95 % interval" if used >= FEWEST_REQUESTS else ""
    length = ", and the lengths of their prefills" if phase == "prefill" else ""
    parts = [
        f"FIFO's figure ÷ the policy's{interval}: 1 is no gain. Supposed: {phase}, "
        f"{tag_and_time(context)}; {whole} requests in full batches of {size}, all waiting at "
        f"once; experts in order on {formats.plural(made.ranks, 'rank')}.",
        _KNOWS[made.known_by].format(length=length),
        *(_verdict(made, name) for name in _FIGURES),
        *_left_out(made),
    ]
    return " ".join(filter(None, parts))


def _verdict(made: Batching, name: str) -> str:
    """Whether there is a gain, in words."""
    known = [one for one in made.policies if one.gains is not None]
    if not known:
        return ""
    if made.policies[0].requests < FEWEST_REQUESTS:
        # Once for both figures.
        text = f"Too few requests to say: an interval takes {FEWEST_REQUESTS}."
        return text if name == next(iter(_FIGURES)) else ""
    words = ", ".join(f"{POLICIES[one.policy]} {_gained(one, name)[3]}" for one in known)
    return f"{_FIGURES[name].capitalize()}: {words}."


def _left_out(made: Batching) -> list[str]:
    parts = []
    if made.left_out:
        lost = formats.plural(made.left_out, "request")
        parts.append(f"Left out: {lost} without some of their {made.phase} tokens.")
    if made.blind:
        layers = ", ".join(str(index) for index in made.blind)
        parts.append(f"Left out: layers {layers}, which do not know whose their tokens are.")
    return parts
