import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics.gemm import gemm_bucket, gemm_size_table, small_gemm_share

sizes = st.lists(st.integers(0, 200), max_size=60)


def histogram(counts, buckets=10):
    return np.bincount(gemm_bucket(np.array(counts, dtype=int)), minlength=buckets)


@given(count=st.integers(0, 2**50))
def test_a_bucket_is_the_length_in_bits(count):
    assert int(gemm_bucket(count)) == count.bit_length()


@given(counts=sizes)
def test_small_share_equals_counting(counts):
    ran = [c for c in counts if c > 0]
    expected = sum(c < 16 for c in ran) / len(ran) if ran else float("nan")
    share = small_gemm_share(histogram(counts))
    assert float(share) == pytest.approx(expected, nan_ok=True)


@given(counts=sizes, idle=st.integers(0, 50))
def test_experts_without_work_change_nothing(counts, idle):
    with_idle = small_gemm_share(histogram(counts + [0] * idle))
    np.testing.assert_array_equal(with_idle, small_gemm_share(histogram(counts)))


def test_the_tile_is_the_border():
    np.testing.assert_array_equal(
        small_gemm_share([histogram([0, 1, 15]), histogram([16, 0]), histogram([0])]),
        [1, 0, np.nan],
    )
    assert small_gemm_share([7, 2]) == 1  # fewer buckets than a tile needs


@given(counts=sizes)
def test_table_ranges_hold_their_cells(counts):
    table = gemm_size_table(histogram(counts))
    assert table.cells.sum() == len(counts)
    for low, high, cells in zip(*table, strict=True):
        assert sum(low <= c <= high for c in counts) == cells


def test_table_has_no_gaps():
    table = gemm_size_table(np.ones((2, 63), dtype=int))
    assert table.lower[:5].tolist() == [0, 1, 2, 4, 8]
    np.testing.assert_array_equal(table.lower[1:], table.upper[:-1] + 1)
    assert table.upper[-1] == 2**62 - 1
    assert table.cells.shape == (2, 63)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(64,\).*63 buckets"):
        gemm_size_table(np.ones(64, dtype=int))
    for function in (gemm_size_table, small_gemm_share):
        with pytest.raises(UsageError, match=r"\(0,\)"):
            function(np.zeros(0, dtype=int))
    with pytest.raises(UsageError, match="negative"):
        gemm_bucket(-1)
