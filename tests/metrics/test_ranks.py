import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics.balance import balancedness, max_violation
from routeprof.metrics.ranks import contiguous, rank_loads, rank_of_slot


@st.composite
def placements(draw):
    """(counts, placement, ranks) with every expert placed at least once."""
    experts = draw(st.integers(1, 8))
    extra = draw(st.lists(st.integers(0, experts - 1), max_size=8))
    placement = draw(st.permutations([*range(experts), *extra]))
    counts = draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))
    return counts, placement, draw(st.integers(1, len(placement)))


@given(case=placements())
def test_equals_dealing_slots_to_ranks(case):
    counts, placement, ranks = case
    expected = [0.0] * ranks
    slots = list(placement)
    for rank in range(ranks):
        for _ in range(-(-len(slots) // (ranks - rank))):
            expert = slots.pop(0)
            expected[rank] += counts[expert] / placement.count(expert)
    np.testing.assert_allclose(rank_loads(counts, placement, ranks), expected, atol=1e-9)


@given(case=placements())
def test_no_load_is_lost(case):
    counts, placement, ranks = case
    loads = rank_loads(counts, placement, ranks)
    assert loads.sum() == pytest.approx(sum(counts))
    doubled = rank_loads(np.array([counts, counts]) * [[1], [2]], placement, ranks)
    np.testing.assert_allclose(doubled, [loads, 2 * loads])


def test_slots_are_dealt_as_vllm_does():
    assert rank_of_slot(8, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rank_of_slot(10, 4).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert contiguous(4, 2).tolist() == [0, 1, 2, 3]


def test_placement_per_layer():
    counts = np.arange(24).reshape(2, 3, 4)  # steps, layers, experts
    placement = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3]]
    together = rank_loads(counts, placement, 2)
    assert together.shape == (2, 3, 2)
    for step, layer in np.ndindex(2, 3):
        np.testing.assert_array_equal(
            together[step, layer], rank_loads(counts[step, layer], placement[layer], 2)
        )


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(3,\).*each of 4 experts"):
        rank_loads([1, 2, 3, 4], [0, 1, 2], 1)
    with pytest.raises(UsageError, match="name no other"):
        rank_loads([1, 2], [0, 1, 2], 1)
    with pytest.raises(UsageError, match="negative"):
        rank_loads([1, 2], [0, 1, -1], 1)
    with pytest.raises(UsageError, match=r"\(2, 2\).*\(3, 2\)"):
        rank_loads(np.ones((3, 2)), [[0, 1], [1, 0]], 1)
    with pytest.raises(UsageError, match=r"\(1, 2\).*\(2,\)"):
        rank_loads([1, 2], [[0, 1]], 1)
    with pytest.raises(UsageError, match="at most 2 ranks"):
        contiguous(2, 3)
    with pytest.raises(UsageError, match="ranks is 0"):
        rank_of_slot(2, 0)


@pytest.fixture(scope="module")
def decode(realdata):
    text = (realdata / "sglang-dsv3" / "decode_in2000out100.json").read_text(encoding="utf-8")
    return np.array(json.loads(text)["logical_count"])[3:]


def test_deepseek_v3_contiguous_on_32_ranks(decode):
    loads = rank_loads(decode, contiguous(256, 32), 32)
    assert max_violation(loads).mean() == pytest.approx(1.633, abs=5e-4)
    assert balancedness(loads).mean() == pytest.approx(0.434, abs=5e-4)


@pytest.mark.parametrize(("prefix", "expected"), [("", 0.880), ("A2", 0.227), ("A3", 0.202)])
def test_published_placements_on_8_ranks(realdata, decode, prefix, expected):
    placement = contiguous(256, 8)
    if prefix:
        (path,) = (realdata / "omni-placement").glob(f"{prefix}_*.npy")
        held = np.load(path).transpose(1, 0, 2)  # layers, ranks, experts: 1 where held
        placement = np.nonzero(held)[2].reshape(len(held), -1)
    loads = rank_loads(decode, placement, 8)
    assert max_violation(loads).mean() == pytest.approx(expected, abs=5e-4)
