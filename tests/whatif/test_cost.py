"""The cost model against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from routeprof.errors import UsageError
from routeprof.whatif.cost import (
    Sizes,
    exchange_seconds,
    expert_seconds,
    reduction,
    reduction_seconds,
)
from routeprof.whatif.hardware import HARDWARE, Hardware, hardware
from routeprof.whatif.layout import Layout
from routeprof.whatif.traffic import Flows

# 1000 operations, 100 bytes of memory, 10 and 1 bytes of links a second.
SLOW = Hardware(1000, 2000, 100, 10, 1)
SIZES = Sizes(hidden=4, width=5, weight=2, dispatch=1, combine=2)  # 60 weights in an expert


def test_experts_take_what_their_arithmetic_or_their_weights_take():
    layout = Layout(1, 2, 2, 1)
    # Weights: 120 bytes, 1.2 s. A token: 120 operations, 0.12 s; 10 are as long as the weights.
    loads = np.array([[1, 0, 0, 0], [1, 1, 0, 20], [0, 0, 0, 0]])
    seconds = expert_seconds(loads, np.array([0, 0, 1, 1]), layout, SIZES, SLOW)
    assert seconds.tolist() == pytest.approx([1.2, 2.4, 0])


def test_a_part_of_an_expert_takes_its_part():
    layout = Layout(1, 4, 2, 2)
    seconds = expert_seconds(np.array([[20, 0]]), np.array([0, 1]), layout, SIZES, SLOW)
    assert seconds.tolist() == pytest.approx([1.2])


def test_eight_bits_are_computed_faster():
    sizes = Sizes(4, 5, weight=1, dispatch=1, combine=2)
    layout = Layout(1, 1, 1, 1)
    seconds = expert_seconds(np.array([[100]]), np.array([0]), layout, sizes, SLOW)
    assert seconds.tolist() == pytest.approx([6.0])


def test_an_exchange_takes_what_the_busiest_link_takes():
    inside = np.array([[3, 0], [0, 0], [0, 0]])
    between = np.array([[0, 0], [0, 1], [0, 0]])
    nothing = np.zeros((3, 2), dtype=int)
    moved = Flows(nothing, nothing, inside, between)
    assert exchange_seconds(moved, 20, SLOW).tolist() == pytest.approx([6, 20, 0])
    slow = SLOW.with_rates(latency=0.5)
    assert exchange_seconds(moved, 20, slow).tolist() == pytest.approx([6.5, 20.5, 0])


@pytest.mark.parametrize(
    ("layout", "gpus", "inside", "between"),
    [
        (Layout(8, 1, 8, 1), 8, 2 * 7 / 8, 0),
        (Layout(8, 1, 8, 1), 1, 0, 0),
        (Layout(8, 1, 8, 1, nodes=2), 4, 2 * 3 / 4, 0),
        (Layout(8, 1, 8, 1, nodes=2), 8, 2 * 3 / 4, 2 * 1 / 2 / 4),
        (Layout(8, 1, 8, 1, nodes=8), 8, 0, 2 * 7 / 8),
        (
            Layout(4, 3, 12, 1, nodes=2),
            4,
            0,
            2 * 3 / 4,
        ),  # one spans two nodes
    ],
)
def test_what_an_all_reduce_sends(layout: Layout, gpus: int, inside: float, between: float):
    one = reduction(layout, gpus)
    assert (one.inside, one.between) == pytest.approx((inside, between))


def test_an_all_reduce_sends_inside_and_then_between():
    one = reduction(Layout(4, 1, 4, 1, nodes=2), 4)  # 1 inside, 1/2 between
    seconds = reduction_seconds(one, np.array([3, 0]), 20, SLOW.with_rates(latency=1.0e-1))
    assert seconds.tolist() == pytest.approx([3 * 20 * (1 / 10 + 0.5 / 1) + 0.1, 0])


def test_all_reduces_send_as_much_as_rings_do_at_least():
    """Each of n GPUs must send 2 (n − 1) / n of the whole where all share the work."""
    for nodes in (1, 2, 4):
        layout = Layout(8, 1, 8, 1, nodes=nodes)
        one = reduction(layout, 8)
        assert one.inside + one.between == pytest.approx(2 * 7 / 8)


def test_hardware_by_name():
    assert hardware("H100") is HARDWARE["h100"]
    assert all(one.source for one in HARDWARE.values())
    with pytest.raises(UsageError, match="not one of a100, h100"):
        hardware("abacus")
    given = hardware("h100").with_rates(flops=1e12, inside=None)
    assert given.flops == given.flops_8bit == 1e12
    assert given.inside == hardware("h100").inside
    assert given.source.startswith("as given")
    with pytest.raises(UsageError, match="above 0"):
        given.with_rates(memory=0)
