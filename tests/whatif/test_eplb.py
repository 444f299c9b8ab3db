"""EPLB anew, against its published example and against its rules, told one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.whatif.eplb import balanced_packing, rebalance_experts, replicate_experts

WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PHY2LOG = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example():
    phy2log, log2phy, logcnt = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert phy2log.tolist() == PHY2LOG
    for layer, expert in np.ndindex(logcnt.shape):
        slots = np.flatnonzero(phy2log[layer] == expert)
        assert logcnt[layer, expert] == len(slots)
        mine = log2phy[layer, expert]
        assert sorted(mine[mine >= 0]) == slots.tolist()
        assert (mine[len(slots) :] == -1).all()


@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=12), spare=st.integers(0, 12))
def test_spare_slots_make_the_largest_share_as_small_as_can_be(weights, spare):
    _, _, count = replicate_experts([weights], len(weights) + spare)
    assert count.sum() == len(weights) + spare
    # With a smaller largest share each expert would need more replicas than there are slots.
    largest = max(weight / replicas for weight, replicas in zip(weights, count[0], strict=True))
    fewer = [max(1, weight // (largest * (1 - 1e-6)) + 1) for weight in weights] if largest else []
    assert not largest or sum(fewer) > len(weights) + spare


def packed_one_by_one(weights, packs):
    """The rule in plain Python: the heaviest first, each into the lightest pack with room."""
    inside = [[] for _ in range(packs)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        room = [pack for pack in inside if len(pack) < len(weights) // packs]
        min(room, key=lambda pack: sum(weights[one] for one in pack)).append(item)
    return inside


@given(data=st.data(), packs=st.integers(1, 5), room=st.integers(2, 5))
def test_packing_equals_packing_one_by_one(data, packs, room):
    size = packs * room
    weights = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    pack, rank = balanced_packing([weights], packs)
    for number, items in enumerate(packed_one_by_one(weights, packs)):
        assert [(pack[0, item], rank[0, item]) for item in items] == [
            (number, place) for place in range(room)
        ]


def test_groups_stay_on_a_node_where_nodes_divide_them():
    weight = np.random.default_rng(0).integers(1, 1000, (3, 32))
    phy2log, _, _ = rebalance_experts(weight, 48, 8, 4, 8)
    node = np.arange(48) // 12
    for layer in phy2log:
        assert (
            len({(slot_node, expert // 4) for slot_node, expert in zip(node, layer, strict=True)})
            == 8
        )
    everywhere, _, _ = rebalance_experts(weight, 48, 8, 3, 6)
    np.testing.assert_array_equal(everywhere, rebalance_experts(weight, 48, 1, 1, 6)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((15, 4, 2, 8), "num_replicas"),
        ((8, 4, 2, 8), "6 slots for|4 slots for"),
        ((16, 5, 1, 8), "num_groups"),
        ((16, 4, 2, 0), "num_gpus is 0"),
    ],
)
def test_what_does_not_divide_is_said(arguments, message):
    with pytest.raises(UsageError, match=message):
        rebalance_experts(WEIGHT, *arguments)
