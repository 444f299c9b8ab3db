"""The oracle agrees with itself, and the table with the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.families import BY_TYPE, DECODER_LENGTH, EXPERTS, FAMILIES, Family, build, inputs
from tests.zoo.oracle import Truth, masked_counts, oracle, unpadded_counts

SUPPORTED = [family for family in FAMILIES if not family.unsupported_reason]
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}
# Families whose combine weights do not follow from scores of [rows, experts].
UNSCORED = {
    "phimoe": "every choice has a softmax of its own, over the logits near the best one left",
    "doge": "its router scores halves of an expert's id",
}


def parametrise(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.model_type)


def truth_of(family: Family, experts_implementation: str | None = None) -> Truth:
    model = build(family, experts_implementation=experts_implementation)
    with oracle(model) as truth:
        model(**inputs(family))
    return truth


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert {layer: counts.tolist() for layer, counts in one.items()} == {
        layer: counts.tolist() for layer, counts in other.items()
    }


def test_every_family_is_listed_once():
    assert len(FAMILIES) == len(BY_TYPE) == 76


@parametrise(SUPPORTED)
def test_every_row_is_dispatched_to_k_experts(family: Family):
    truth = truth_of(family, "eager")
    rows = inputs(family)["attention_mask"].numel()
    assert len(truth.counts) >= 2
    assert truth.counts.keys() == truth.ids.keys()
    for layer, ids in truth.ids.items():
        assert len(ids) % (2 * DECODER_LENGTH if "decoder" in layer else rows) == 0
        assert ids.shape[1] == family.top_k
        assert truth.counts[layer].shape == (family.experts,)
        assert truth.counts[layer].dtype == torch.int64
    assert_same(truth.counts, {layer: truth.histogram(ids) for layer, ids in truth.ids.items()})


@parametrise(SUPPORTED)
def test_rows_disagree_about_the_experts(family: Family):
    """Otherwise equal counts would say little about ids."""
    for layer, ids in truth_of(family).ids.items():
        assert len(ids.sort(dim=1).values.unique(dim=0)) > 2, layer


@parametrise([family for family in SUPPORTED if not family.own_loop])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_implementations_execute_the_same_experts(family: Family, implementation: str):
    eager, other = truth_of(family, "eager"), truth_of(family, implementation)
    assert_same(other.counts, eager.counts)
    assert_same(other.reached, eager.reached)
    assert_same(other.ids or eager.ids, eager.ids)


@parametrise([family for family in SUPPORTED if not family.padding_leaks])
def test_padding_does_not_change_the_experts_of_other_rows(family: Family):
    model, tensors = build(family, experts_implementation="eager"), inputs(family)
    with oracle(model) as truth:
        model(**tensors)
    alone = unpadded_counts(model, family, tensors)
    assert_same(alone, masked_counts(truth, tensors["attention_mask"]))


@parametrise([family for family in SUPPORTED if family.model_type not in UNSCORED])
def test_scoring_explains_the_combine_weights(family: Family):
    model = build(family, experts_implementation="eager")
    with oracle(model) as truth, scores_of(model, family) as scores:
        model(**inputs(family))
    assert truth.weights.keys() == truth.counts.keys()
    for layer, weights in truth.weights.items():
        ids = truth.ids[layer][-len(scores[layer]) :]
        if weights.shape[1] == family.experts:
            weights = weights.gather(1, ids.clamp(min=0))
        expected = scores[layer].gather(1, ids.clamp(min=0)).where(~_unused(ids, family), 0)
        if family.top_k > 1:
            weights, expected = _normalised(weights), _normalised(expected)
        torch.testing.assert_close(weights, expected)


def _unused(ids: Tensor, family: Family) -> Tensor:
    skip = family.experts - 1 if family.model_type == "zaya" else -1
    return (ids == skip) | (ids < 0)


def _normalised(weights: Tensor) -> Tensor:
    return nn.functional.normalize(weights, p=1)


@contextmanager
def scores_of(model: nn.Module, family: Family) -> Iterator[dict[str, Tensor]]:
    """What the routers' outputs of the last call make of every expert, by layer of the oracle."""
    scores: dict[str, Tensor] = {}
    handles = []
    for path, module in model.named_modules():
        block, _, leaf = path.rpartition(".")
        if leaf in ("gate", "router"):
            layer = block if family.model_type == "jetmoe" else f"{block}.experts"

            def keep(_: nn.Module, __: Any, output: Any, layer: str = layer) -> None:
                logits = _logits(output, family)
                returns_probs = family.router_returns == "probs"
                scores[layer] = logits if returns_probs else SCORES[family.scoring](logits)

            handles.append(module.register_forward_hook(keep))
    yield scores
    for handle in handles:
        handle.remove()


def _logits(output: Any, family: Family) -> Tensor:
    """The last wide float output: llama4, switch and nllb return their weights before it."""
    outputs = [output] if isinstance(output, Tensor) else output
    return [
        tensor.flatten(0, -2).float()
        for tensor in outputs
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.shape[-1] == family.experts
    ][-1]


def test_zaya_computes_expert_0_for_skipped_rows():
    truth = truth_of(BY_TYPE["zaya"])
    skipped = 0
    for layer, counts in truth.counts.items():
        expected = torch.cat([counts[:1] + counts[-1:], counts[1:-1], torch.zeros(1).long()])
        assert truth.reached[layer].equal(expected)
        skipped += int(counts[-1])
    assert skipped > 0


def test_nllb_runs_two_experts_whatever_its_router_chose():
    truth = truth_of(BY_TYPE["nllb-moe"])
    for layer, reached in truth.reached.items():
        assert reached[2:].sum() == 0
        assert reached.sum() == len(truth.ids[layer]) * EXPERTS
        assert truth.counts[layer][2:].sum() > 0


def test_longcat_chooses_experts_without_weights():
    truth = truth_of(BY_TYPE["longcat_flash"])
    assert sum(int(counts[EXPERTS:].sum()) for counts in truth.counts.values()) > 0


def test_a_looped_layer_runs_twice():
    rows = [len(ids) for ids in truth_of(BY_TYPE["inkling2_loop_text"], "eager").ids.values()]
    assert rows == [20, 40, 40, 20]


def test_builds_are_reproducible():
    """Some experts are left uninitialised by transformers."""
    one, other = (build(BY_TYPE["qwen3_omni_moe_talker_text"]) for _ in range(2))
    for name, tensor in one.state_dict().items():
        assert tensor.equal(other.state_dict()[name]), name


def test_calls_made_by_hooks_are_not_the_models_own():
    model = build(BY_TYPE["mixtral"], experts_implementation="eager")
    forward = model.forward
    ids = torch.zeros(5, 3, dtype=torch.long)
    for path, module in model.named_modules():
        if path.endswith(("experts", "gate")):
            module.register_forward_pre_hook(lambda *_: (nn.functional.one_hot(ids), None)[1])
    with oracle(model) as truth:
        model(**inputs(BY_TYPE["mixtral"]))
    assert {len(chosen) for chosen in truth.ids.values()} == {20}
    assert model.forward == forward
