"""The fused kernels against their torch twin and against counting by hand.

On a CUDA device; and on the CPU, under Triton's interpreter, where tests/capture/test_fused.py
runs this file again.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

# First, because it skips this module where no kernel can run.
from tests.gpu.device import DEVICE, EFFORT, INTERPRETED
from tests.gpu.reference import (
    EXPERTS,
    GATE_START,
    ID_TYPES,
    LOGIT_TYPES,
    STEP_START,
    Call,
    by_kernel,
    by_twin,
    check_call,
    check_fold,
    fused,
    layout_of,
    random_call,
    random_rows,
)

pytestmark = pytest.mark.gpu

USUAL = {"on": 1, "rows": None, "valid": None, "tokens": 33, "gate": True}
WHOLE = {**USUAL, "logits": True, "weights": True}


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """The interpreter computes both sides of every choice, and numpy would warn of one."""
    with np.errstate(all="ignore"):
        yield


def random_of(*seed: object) -> np.random.Generator:
    return np.random.default_rng(list(repr(seed).encode()))


@pytest.mark.parametrize("seed", range(40 * EFFORT))
def test_any_call(seed):
    check_call(random_call(random_of("any", seed), DEVICE))


@pytest.mark.parametrize(("id_type", "experts"), list(product(ID_TYPES, EXPERTS)))
def test_ids(id_type, experts):
    fixed = {**USUAL, "id_type": id_type, "experts": experts, "gate": False}
    check_call(random_call(random_of(id_type, experts), DEVICE, **fixed))


def test_far_away_ids_do_not_wrap():
    ids = torch.tensor([[2**32 + 1, 2**62, -(2**62), 2**31, -(2**33) + 2]], device=DEVICE)
    call = random_call(random_of(), DEVICE, **{**USUAL, "experts": 5, "tokens": 1, "gate": False})
    call.ids = ids
    step_row, _ = by_kernel(call)
    assert (step_row - STEP_START).tolist()[:7] == [2, 0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize("choices", range(1, 9))
def test_choices(choices):
    for experts in (8, 60):
        fixed = {**WHOLE, "choices": choices, "experts": experts, "scoring": "softmax"}
        check_call(random_call(random_of(choices, experts), DEVICE, **fixed))


@pytest.mark.parametrize(("scoring", "logit_type"), list(product(fused.SCORINGS, LOGIT_TYPES)))
def test_scoring(scoring, logit_type):
    for ties, experts in ((True, 6), (False, 160)):
        fixed = {"scoring": scoring, "logit_type": logit_type, "ties": ties, "experts": experts}
        random = random_of(scoring, logit_type, ties, experts)
        check_call(random_call(random, DEVICE, **WHOLE, **fixed, choices=4))


@pytest.mark.parametrize("experts", EXPERTS)
def test_gate_of_so_many_experts(experts):
    fixed = {**WHOLE, "experts": experts, "scoring": "sigmoid", "spare": 3}
    check_call(random_call(random_of(experts), DEVICE, **fixed))


def test_margin_where_every_expert_is_chosen_is_unknown():
    fixed = {**WHOLE, "experts": 6, "choices": 6, "scoring": "softmax"}
    call = random_call(random_of(), DEVICE, **fixed)
    check_call(call)
    _, gate_row = by_kernel(call)
    assert np.isnan(gate_row[-3])
    assert np.isfinite(np.delete(gate_row, -3)).all()


def test_margin_of_another_top_k_than_the_ids_have():
    """A shared expert may ride along in the ids."""
    fixed = {**WHOLE, "experts": 16, "choices": 5, "top_k": 4, "scoring": "softmax"}
    check_call(random_call(random_of(), DEVICE, **fixed))


@pytest.mark.parametrize("scoring", fused.SCORINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e4, 0.0])
def test_odd_logits_do_what_they_do_to_the_twin(scoring, value):
    """One odd logit in a row that counts, and a row of nothing else."""
    fixed = {**WHOLE, "experts": 6, "choices": 2, "scoring": scoring, "ties": False, "tokens": 4}
    call = random_call(random_of(scoring), DEVICE, **fixed, logit_type=torch.float32)
    call.logits[1, 3] = value
    check_call(call, by_hand=False)
    # Where all scores are 0, they cannot be normalised: 0 / 0 on one device, tiny / tiny elsewhere.
    if value != -1e4 or scoring == "softmax":
        call.logits[1] = value
        check_call(call, by_hand=False)


@pytest.mark.parametrize("logit_type", LOGIT_TYPES)
def test_softplus_of_very_negative_logits(logit_type):
    """1 + exp(-20) is 1 in 32 bits, and its logarithm 0."""
    fixed = {**WHOLE, "experts": 8, "choices": 2, "scoring": "sqrtsoftplus"}
    call = random_call(random_of(), DEVICE, **fixed, logit_type=logit_type)
    call.logits.sub_(25).clamp_(max=-12)
    check_call(call)


MASKS = [
    pytest.param({"rows": rows, "offset": offset, "valid": valid, "on": on}, id=f"{number}")
    for number, (rows, offset, valid, on) in enumerate(
        [
            *product((0, 1, 20, 33, 50), (0, 5, -5, 40, -50), (None,), (1,)),
            *product((None, 20), (4,), (torch.int64, torch.bool), (1, 0)),
            *product((None, 20), (-4,), (None,), (0, -1, 3)),
        ]
    )
]


@pytest.mark.parametrize("masks", MASKS)
def test_masks(masks):
    fixed = {**WHOLE, **masks, "experts": 60, "choices": 4, "scoring": "softmax"}
    check_call(random_call(random_of(str(masks)), DEVICE, **fixed))


def test_what_is_in_rows_that_do_not_count_does_not_matter():
    fixed = {**WHOLE, "rows": 9, "offset": 4, "experts": 60, "choices": 4, "scoring": "sigmoid"}
    call = random_call(random_of(), DEVICE, **fixed)
    assert torch.isnan(call.logits[:4]).all()
    assert torch.isnan(call.weights[13:]).all()
    step_row, gate_row = by_kernel(call)
    assert step_row[-2] == STEP_START + 9
    assert np.isfinite(gate_row).all()


def test_off_touches_nothing():
    call = random_call(random_of(), DEVICE, **{**WHOLE, "on": 0, "logits": True, "weights": False})
    step_row, gate_row = by_kernel(call)
    assert (step_row == STEP_START).all()
    assert (gate_row == GATE_START).all()


@pytest.mark.parametrize("choices", [1, 8])
def test_a_call_without_rows_is_a_call(choices):
    call = random_call(random_of(), DEVICE, **{**WHOLE, "tokens": 0, "experts": 8, "spare": 0})
    call.ids = call.ids.new_zeros(0, choices)
    call.weights = call.weights.new_zeros(0, choices)
    check_call(call)
    step_row, gate_row = by_kernel(call)
    assert (step_row - STEP_START).tolist() == [0] * 11 + [1]
    assert (gate_row == GATE_START).all()


def test_without_weights_those_of_this_layer_are_unknown():
    fixed = {**WHOLE, "weights": False, "experts": 5, "spare": 7, "scoring": "softmax"}
    call = random_call(random_of(), DEVICE, **fixed, choices=2)
    check_call(call)
    _, gate_row = by_kernel(call)
    assert np.isnan(gate_row).nonzero()[0].tolist() == [*range(12, 17)]


def test_more_rows_than_programs(monkeypatch):
    """Programs then take several tiles each."""
    monkeypatch.setattr(fused, "MAX_PROGRAMS", 2)
    for rows, offset in ((None, 0), (70, 3), (500, -7)):
        fixed = {**WHOLE, "tokens": 101, "rows": rows, "offset": offset, "experts": 60}
        check_call(random_call(random_of(rows), DEVICE, **fixed, choices=4, scoring="softmax"))


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_prefill(experts):
    fixed = {**WHOLE, "tokens": 20_000, "experts": experts, "choices": 8, "scoring": "softmax"}
    call = random_call(random_of(), DEVICE, **fixed)
    found, wanted = by_kernel(call), by_twin(call)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3)


def test_calls_add_up():
    random = random_of()
    fixed = {**WHOLE, "experts": 8, "choices": 2, "spare": 0, "scoring": "softmax"}
    calls = [random_call(random, DEVICE, **fixed) for _ in range(3)]
    alone = [by_kernel(call) for call in calls]
    whole = Call(
        *(torch.cat([getattr(call, n) for call in calls]) for n in ("ids", "logits", "weights")),
        *(getattr(calls[0], n) for n in "on rows valid offset experts top_k scoring".split()),
        widest=8,
    )
    step_row, gate_row = by_kernel(whole)
    counted = sum(row - STEP_START for row, _ in alone)
    np.testing.assert_array_equal(counted[:-1], (step_row - STEP_START)[:-1])
    assert counted[-1] == 3
    summed = sum(row - GATE_START for _, row in alone)
    np.testing.assert_allclose(summed, gate_row - GATE_START, rtol=1e-4)


@pytest.mark.parametrize("name", ["logits", "weights", "valid"])
def test_a_tensor_of_another_shape_is_refused(name):
    call = random_call(random_of(), DEVICE, **{**WHOLE, "valid": torch.bool, "scoring": "softmax"})
    setattr(call, name, getattr(call, name)[:-1])
    with pytest.raises(ValueError, match=f"{name} has shape"):
        by_kernel(call)


def test_more_experts_than_the_row_has_are_refused():
    call = random_call(random_of(), DEVICE, **{**USUAL, "logits": False})
    call.experts = call.widest + 1
    with pytest.raises(ValueError, match="cannot hold"):
        by_kernel(call)


def test_an_unknown_scoring_is_refused():
    with pytest.raises(ValueError, match="scoring is 'hash'"):
        by_kernel(random_call(random_of(), DEVICE, **{**WHOLE, "scoring": "hash"}))


LAYOUTS = [
    layout_of((8, 2)),
    layout_of((5, 1), (60, 4), (6, 6)),
    layout_of((160, 6), (256, 8), capacity_factors=(1.0, 1.1, 2.0)),
    layout_of((1, 1), (2, 1), capacity_factors=(1.25,)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.experts} experts")
@pytest.mark.parametrize("steps", [0, 1, 7 * EFFORT])
def test_fold(layout, steps):
    random = random_of(layout.experts, steps)
    slots = random.integers(0, layout.slots, steps)
    check_fold(layout, random_rows(random, layout, steps), slots, DEVICE)


def test_many_steps_of_one_slot():
    random, layout = random_of(), layout_of((6, 2), (128, 8))
    check_fold(layout, random_rows(random, layout, 16 * EFFORT), np.full(16 * EFFORT, 5), DEVICE)


def test_every_imbalance_falls_into_the_bin_of_the_twin():
    """Each ratio max / mean that so many assignments can have."""
    assignments = 24 * EFFORT
    layout = layout_of((64, 1))
    rows = np.zeros((assignments, 1, layout.step_width), np.int64)
    for most, row in enumerate(rows[:, 0], start=1):
        row[1], row[2] = most, min(most, assignments - most)
        row[3] = max(0, assignments - 2 * most)
        row[-2:] = assignments, 1
    check_fold(layout, rows, np.arange(assignments) % layout.slots, DEVICE)


def test_rows_with_gaps_are_refused():
    layout = layout_of((8, 2))
    rows = torch.zeros(4, 1, layout.step_width, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        fused.fold_steps(rows, rows.double(), rows[::2], rows[:2, 0, 0], layout, None)
