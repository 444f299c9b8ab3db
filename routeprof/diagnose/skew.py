"""Rules on skew: hot experts and whose doing they are, steps that differ, cold experts."""

from __future__ import annotations

import numpy as np

from routeprof.diagnose.causes import LayerSkew, skew_by_tag
from routeprof.diagnose.finding import Finding, layer_count, layer_list
from routeprof.diagnose.question import Question
from routeprof.diagnose.routing import collapse, hot_experts
from routeprof.diagnose.steps import hot_cold, step_skew

NO_TAGS = "needs two tags with enough tokens each: record each kind of traffic under its tag"


def skew(question: Question) -> tuple[list[Finding], str]:
    """Findings on skew, each layer in one of them; and why causes are not known, if so."""
    fallen = list(collapse(question.profile, question.limits))
    said = {layer for finding in fallen for layer in finding.layers}
    by_tag = [one for one in skew_by_tag(question) if one.layer not in said]
    causes = _causes(by_tag, question)
    said |= {layer for finding in causes for layer in finding.layers}
    hot = list(hot_experts(question.profile, question.limits, said))
    said |= {layer for finding in hot for layer in finding.layers}
    found = fallen + causes + hot + step_skew(question, said)
    found += hot_cold(question, {layer for finding in found for layer in finding.layers})
    return found, "" if by_tag or not hot else NO_TAGS


# -- the cause


def _causes(by_tag: list[LayerSkew], question: Question) -> list[Finding]:
    """One finding for the cause of most layers; it also tells of the others."""
    model, narrow = (
        [one for one in by_tag if one.cause(question.limits) == name] for name in ("model", "input")
    )
    if model and len(model) >= len(narrow):
        return [_model_skew(model, narrow, question)]
    return [_narrow_input(narrow, model, question)] if narrow else []


def _model_skew(model: list[LayerSkew], narrow: list[LayerSkew], question: Question) -> Finding:
    worst = max(model, key=lambda one: one.mixed)
    also = f"; in {_layers(narrow)} it differs by tag" if narrow else ""
    return Finding(
        "model-skew",
        "warning",
        f"every tag is skewed, and so is their mix: in layer {worst.layer} the hottest expert gets "
        f"{worst.least:.2f} to {worst.worst:.2f} times the mean by tag, {worst.mixed:.2f} with all "
        f"tags mixed evenly, whose hottest expert is above the mean in {worst.sharing} of "
        f"{worst.tags} tags; {layer_count(len(model))} like that{also}",
        "the model's doing, which no mix of prompts cures: replicate hot experts "
        "(routeprof whatif placement), allow for it in capacity, or train with a balance loss",
        tuple(sorted(one.layer for one in (*model, *narrow))),
        figures=_figures(worst),
    )


def _narrow_input(narrow: list[LayerSkew], model: list[LayerSkew], question: Question) -> Finding:
    worst = max(narrow, key=lambda one: one.worst / one.mixed)
    also = f"; in {_layers(model)} every tag is skewed, and so is the mix" if model else ""
    known = not np.isnan(worst.noise)
    noise = f"; noise stays below {worst.noise:.3f}" if known else "; too few steps to bound noise"
    return Finding(
        "narrow-input",
        "warning",
        f"skew differs by tag: in layer {worst.layer} the hottest expert gets {worst.worst:.2f} "
        f"times the mean on {worst.tag!r} and {worst.mixed:.2f} with all tags mixed evenly; "
        f"{layer_count(len(narrow))} like that (divergence {worst.divergence:.3f} bits{noise})"
        f"{also}",
        "the input's doing: put requests of different kinds into one batch "
        "(routeprof whatif batching), and record what is really served before placing experts",
        tuple(sorted(one.layer for one in (*narrow, *model))),
        figures=_figures(worst),
        gain=f"mixed evenly, layer {worst.layer} would have {worst.mixed:.2f} times the mean "
        f"instead of {worst.worst:.2f}",
    )


def _layers(skewed: list[LayerSkew]) -> str:
    one = "layer " if len(skewed) == 1 else "layers "
    return one + layer_list(item.layer for item in skewed)


def _figures(one: LayerSkew) -> dict[str, float | str]:
    return {
        "layer": one.layer,
        "tag": one.tag,
        "imbalance_ratio_worst_tag": one.worst,
        "imbalance_ratio_best_tag": one.least,
        "imbalance_ratio_mixed": one.mixed,
        "tags": one.tags,
        "tags_sharing_hottest": one.sharing,
        "divergence": one.divergence,
        "noise": one.noise,
    }
