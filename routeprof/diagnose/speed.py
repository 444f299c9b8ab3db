"""Rule: decode that takes longer than dense layers with as many active weights, and why.

What is measured: the experts' tokens in every step. What is modelled: time, as the roofline of
`whatif.cost` at the peak rates of a GPU, with nothing overlapped. A dense layer has the weights of
top_k experts, and stands on every GPU for that GPU's share of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING

import numpy as np

from routeprof.diagnose.finding import Finding
from routeprof.diagnose.question import Question
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.metrics.ranks import rank_of_slot

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.whatif.cost import Sizes
    from routeprof.whatif.hardware import Hardware
    from routeprof.whatif.layer_runs import LayerRun
    from routeprof.whatif.layout import Layout

LARGER = (4, 16, 64, 256)
"""Times the batch that might help."""

SMALL = "more weights are read than tokens make use of"
CAUSES = {
    "small_gemms": f"{SMALL}: a larger batch",
    "skew": "the others wait for the fullest rank: place the experts by load",
    "communication": "dispatch and combine: another layout (routeprof whatif layout), or overlap",
}


@dataclass(frozen=True)
class Times:
    """Milliseconds of a decode step, all layers; NaN where the recording cannot say.

    Attributes:
        dense: dense layers.
        even: experts with even loads; actual: with those recorded, of the slowest rank.
        communication: dispatch and combine.
    """

    dense: float
    even: float
    actual: float
    communication: float

    @property
    def ratio(self) -> float:
        """MoE ÷ dense; without communication where that is not known."""
        known = 0.0 if isnan(self.communication) else self.communication
        return (self.actual + known) / self.dense

    @property
    def causes(self) -> dict[str, float]:
        """What each cause adds to the dense layers' time; less than 0 where it saves some."""
        return {
            "small_gemms": self.even - self.dense,
            "skew": self.actual - self.even,
            "communication": self.communication,
        }


def slower_than_dense(question: Question) -> list[Finding] | str:
    """Of decode, on the ranks that are asked for or recorded; else on one GPU."""
    profile, ranks = question.profile.narrowed("decode", None), question.ranks or 1
    try:
        times, larger = _times(profile, ranks, question)
    except (UsageError, LevelRequiredError) as error:
        return str(error).replace(": pass --", ": use routeprof whatif layout with --")
    if not times.ratio > question.limits.dense_ratio:
        return []
    causes = {name: one for name, one in times.causes.items() if not isnan(one)}
    main = max(causes, key=lambda name: causes[name])
    parts = ", ".join(
        f"{name.replace('_', ' ')} {one * 1e3:+,.2f} µs" for name, one in causes.items()
    )
    gpus = "1 GPU" if ranks == 1 else f"{ranks} GPUs"
    unknown = "" if len(causes) == 3 else "; communication not known: record level tokens"
    return [
        Finding(
            "slower-than-dense",
            "info",
            f"modelled at {question.hardware} peak rates on {gpus}, the MoE layers of a decode "
            f"step take {times.ratio:.1f} times as long as dense ones with as many active weights "
            f"({times.dense * 1e3:,.2f} µs): {parts}{unknown}",
            f"mostly {main.replace('_', ' ')}: {_remedy(main, times.ratio, larger)}",
            phase="decode",
            figures={"ratio": times.ratio, "cause": main, "dense_ms": times.dense, **times.causes},
            gain=_gain(times.ratio, larger, question.limits.dense_ratio),
        )
    ]


def _remedy(cause: str, ratio: float, larger: dict[int, float]) -> str:
    if cause == "small_gemms" and min(larger.values()) >= ratio:
        return f"{SMALL}, which a larger batch does not mend here: routeprof whatif layout"
    return CAUSES[cause]


def _gain(ratio: float, larger: dict[int, float], limit: float) -> str:
    """The smallest of `LARGER` that is within the limit, else the best, if it is any better."""
    times = next((scale for scale, one in larger.items() if one <= limit), None)
    times = times or min(larger, key=lambda scale: larger[scale])
    if larger[times] >= ratio:
        return f"a larger batch would not help: at {times} times, {larger[times]:.1f} times as long"
    return f"at {times} times the batch, if it routes alike, {larger[times]:.1f} times as long"


def _times(profile: Profile, ranks: int, question: Question) -> tuple[Times, dict[int, float]]:
    """Times as recorded, and the ratio at each of `LARGER`; those only above the limit."""
    from routeprof.whatif.evidence import require_tokens
    from routeprof.whatif.hardware import hardware
    from routeprof.whatif.layer_runs import layer_runs
    from routeprof.whatif.layout import Layout
    from routeprof.whatif.sizes import least_experts, sizes_of

    require_tokens(profile)
    if ranks > least_experts(profile):
        raise UsageError(f"{ranks} ranks are more than experts: pass fewer --gpus")
    gpu, sizes = hardware(question.hardware or ""), sizes_of(profile)
    layout = Layout(1, ranks, ranks, 1, _nodes(profile, ranks))
    runs, _ = layer_runs(profile)
    steps = max((run.steps for run in runs), default=0)
    if not steps:
        raise UsageError("no decode step was recorded: record generation at level steps")
    communication = _communication(profile, layout, sizes, gpu)

    def times(scale: int) -> Times:
        each = [_of_layer(run, layout, sizes, gpu, scale) for run in runs]
        dense, even, actual = np.sum(each, axis=0) * 1e3 / steps
        return Times(float(dense), float(even), float(actual), communication * scale)

    recorded = times(1)
    slow = recorded.ratio > question.limits.dense_ratio
    return recorded, {scale: times(scale).ratio for scale in LARGER if slow}


def _of_layer(run: LayerRun, layout: Layout, sizes: Sizes, gpu: Hardware, scale: int) -> FloatArray:
    """Seconds of all steps: dense, with even loads, as recorded."""
    from routeprof.whatif.cost import expert_seconds

    counts, tokens = run.counts * scale, run.tokens * scale
    flops = gpu.flops_of(sizes.weight)
    active = sizes.expert * run.layer.choices
    dense = np.maximum(2 * active * tokens / layout.ep / flops, active * sizes.weight / gpu.memory)
    slots = rank_of_slot(run.experts, layout.ep)
    seconds = [
        expert_seconds(loads, slots, layout, sizes, gpu).sum()
        for loads in (_even(counts, slots), counts)
    ]
    return np.array([dense[tokens > 0].sum(), *seconds])


def _even(counts: IntArray, rank: IntArray) -> FloatArray:
    """The same assignments spread evenly; fewer than experts go one to each, rank by rank."""
    total, experts = counts.sum(axis=1, keepdims=True), counts.shape[1]
    within = np.arange(experts) - np.searchsorted(rank, rank)
    turn = np.argsort(np.lexsort((rank, within)))
    spread = np.where(total >= experts, total / experts, (turn < total).astype(float))
    return np.asarray(spread)


def _communication(profile: Profile, layout: Layout, sizes: Sizes, gpu: Hardware) -> float:
    from routeprof.whatif.layout_sums import Setting
    from routeprof.whatif.layouts import predict

    if layout.gpus == 1:
        return 0.0
    if not profile.has("tokens"):
        return nan
    (row,) = predict(profile, [layout], Setting(sizes, gpu)).rows
    return row.dispatch_ms + row.combine_ms


def _nodes(profile: Profile, ranks: int) -> int:
    """Hosts of the recording, where they share the ranks evenly; else 1."""
    files = profile.files.ranks if profile.files else ()
    hosts = {rank.state.host for rank in files if rank.state is not None}
    return len(hosts) if hosts and ranks % len(hosts) == 0 else 1
