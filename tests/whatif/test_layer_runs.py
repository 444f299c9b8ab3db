"""Which steps stand for all where there are too many to look at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.whatif.layer_runs import _one_in


@pytest.mark.parametrize("every", [2, 4, 8, 16, 32, 64])
def test_prefill_is_no_more_frequent_than_it_was(every: int) -> None:
    """Five answers of 64 steps each: every prefill is a step whose number divides by 64."""
    tokens = np.full(320, 16)
    tokens[::64] = 1000
    chosen = _one_in(every, tokens)
    assert len(chosen) == 320 // every
    assert abs((tokens[chosen] == 1000).sum() - 5 / every) < 1


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 70))
def test_every_size_is_there_as_often_as_it_was(sizes: list[int], every: int) -> None:
    tokens = np.array(sizes, dtype=np.int64)
    chosen = _one_in(every, tokens)
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) == -(-len(tokens) // every)
    for size in range(6):
        there, of_all = (tokens[chosen] == size).sum(), (tokens == size).sum()
        share = len(chosen) / max(len(tokens), 1)
        assert abs(there - of_all * share) <= 1
    if every == 1:
        assert chosen.tolist() == list(range(len(tokens)))
