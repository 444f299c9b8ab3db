"""Every way to lay a model out on GPUs, with what the recorded tokens would make of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from routeprof.errors import UsageError
from routeprof.metrics._arrays import ratio
from routeprof.whatif.cost import Sizes
from routeprof.whatif.evidence import require_tokens
from routeprof.whatif.layer_runs import LayerRun, layer_runs
from routeprof.whatif.layout import Layout
from routeprof.whatif.layout_sums import Setting, Sums, sums_of_layer

if TYPE_CHECKING:
    from routeprof.profile import Profile


Pair = tuple[LayerRun | None, LayerRun]
"""Steps of a layer to place experts by, if any, and those that the prediction is of."""


@dataclass(frozen=True)
class Prediction:
    """What a layout would make of the recorded steps; NaN where the recording cannot say.

    Attributes:
        straggler_factor: Σ over steps and layers of the slowest rank's load ÷ Σ of the mean rank's.
        tokens_per_gemm: mean tokens of an expert that has any, in a step.
        small_gemm_share: of these, the share with fewer than 16.
        ranks_per_token, nodes_per_token: that hold a token's experts, mean over tokens and layers.
        dispatch_inside … combine_between: bytes of a step, all GPUs and layers together, to GPUs of
            the same node and of others.
        attention_ms … combine_ms: milliseconds of a step, all layers together: attention's
            all-reduce, the way to the experts, the experts of the slowest rank, and the way back.
        expert_bytes: weights of the experts of all layers on the fullest GPU.
    """

    layout: Layout
    straggler_factor: float
    tokens_per_gemm: float
    small_gemm_share: float
    ranks_per_token: float
    nodes_per_token: float
    dispatch_inside: float
    dispatch_between: float
    combine_inside: float
    combine_between: float
    attention_ms: float
    dispatch_ms: float
    experts_ms: float
    combine_ms: float
    expert_bytes: float

    @property
    def total_ms(self) -> float:
        """All four one after another, nothing overlapped."""
        return self.attention_ms + self.dispatch_ms + self.experts_ms + self.combine_ms


@dataclass(frozen=True)
class Predictions:
    """Predictions of all layouts, the quickest first; by straggler factor where time is not known.

    Attributes:
        steps: that they are of; of more, one in ``every``.
        fitted: steps before them that placements were fitted on; 0 for none.
        traffic: whether tokens were recorded, without which dispatch is not known.
    """

    rows: tuple[Prediction, ...]
    steps: int
    every: int
    fitted: int
    traffic: bool


def predict(
    profile: Profile,
    layouts: Iterable[Layout],
    setting: Setting,
    *,
    most_work: int | None = None,
    progress: Callable[[Sequence[Pair]], Iterable[Pair]] = iter,
) -> Predictions:
    """What each layout would make of the recorded steps.

    Each recorded step is one batch for all GPUs. From level ``steps`` ranks' loads and the experts'
    time are known; from level ``tokens`` also what GPUs send to each other.

    Args:
        most_work: tokens times layers times layouts, of more only some steps are looked at; what is
            usual if None.
        progress: passes on the layers while it shows how far it is.

    Raises:
        UsageError: nothing to predict from.
        LevelRequiredError: a recording of level windows.
    """
    require_tokens(profile)
    wanted = tuple(layouts)
    # A token costs as much again where eight GPUs share each expert: it is sent to all of them.
    questions = round(sum(1 + layout.etp / 8 for layout in wanted))
    runs, every = layer_runs(profile, questions, most_work)
    if not wanted or not runs:
        raise UsageError("no layout fits: pass GPUs of which a part can share the experts")
    places = setting.placing != "contiguous"
    pairs = [run.halves() if places else (None, run) for run in runs]
    steps = max(judged.steps for _, judged in pairs)
    if not steps:
        raise UsageError("placements are judged on other steps: record 2 or more, or place none")
    sums = dict.fromkeys(wanted, Sums.nothing())
    for fit, judged in progress(pairs):
        for layout, own in sums_of_layer(judged, fit, wanted, setting):
            sums[layout] = sums[layout].plus(own)
    rows = [_prediction(layout, sums[layout], steps, setting.sizes) for layout in wanted]
    return Predictions(
        rows=tuple(sorted(rows, key=_order)),
        steps=steps,
        every=every,
        fitted=max(fit.steps if fit else 0 for fit, _ in pairs),
        traffic=all(judged.ids is not None for _, judged in pairs),
    )


def _order(row: Prediction) -> tuple[float, ...]:
    known = row.total_ms if row.total_ms == row.total_ms else float("inf")
    return known, row.straggler_factor, row.layout.ep, row.layout.dp


def _prediction(layout: Layout, sums: Sums, steps: int, sizes: Sizes) -> Prediction:
    return Prediction(
        layout=layout,
        straggler_factor=_over(sums.slowest, sums.mean),
        tokens_per_gemm=_over(sums.assignments, sums.gemms),
        small_gemm_share=_over(sums.small, sums.gemms),
        ranks_per_token=_over(sums.ranks, sums.tokens),
        nodes_per_token=_over(sums.nodes, sums.tokens),
        dispatch_inside=sums.dispatch_inside / steps,
        dispatch_between=sums.dispatch_between / steps,
        combine_inside=sums.combine_inside / steps,
        combine_between=sums.combine_between / steps,
        attention_ms=sums.attention / steps * 1e3,
        dispatch_ms=sums.dispatch / steps * 1e3,
        experts_ms=sums.experts / steps * 1e3,
        combine_ms=sums.combine / steps * 1e3,
        expert_bytes=sums.slots * sizes.expert * sizes.weight / layout.etp,
    )


def _over(part: float, whole: float) -> float:
    return float(ratio(part, whole))
