"""Batches composed: against loops, closed forms, and held-out data that must not matter."""

from __future__ import annotations

from collections import Counter
from statistics import mean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.whatif import batching
from routeprof.whatif.batching import compare_requests
from routeprof.whatif.requests.batch_steps import batch_step_counts, waits
from routeprof.whatif.requests.compose import fifo, load_aware, shuffled
from routeprof.whatif.requests.gain import FEWEST_REQUESTS, gain
from routeprof.whatif.requests.signatures import (
    expected_by_class,
    expected_by_prefill,
    signatures,
)
from tests.whatif.requests_made import layer_of, random_requests, requests_of, with_ids_of

SIGNATURES = np.random.default_rng(5).dirichlet(np.full(8, 0.4), size=(2, 3))


def blocks(each: int, names: str = "abc") -> list[str]:
    return [name for name in names for _ in range(each)]


# -- steps, one by one


@st.composite
def composed(draw):
    """Requests of two layers, some ids nobody's, and batches of some of them."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 4))
    number = size * draw(st.integers(1, 3))
    phase = draw(st.sampled_from(["decode", "prefill"]))
    lengths = random.integers(1, 7, number + draw(st.integers(0, 2)))
    layers = []
    for index, (experts, top_k) in enumerate([(5, 1), (8, 3)]):
        ids = random.integers(0, experts, (lengths.sum(), top_k))
        ids[random.random(ids.shape) < draw(st.sampled_from([0.0, 0.1]))] = -1
        prefill = np.zeros((len(lengths), experts), dtype=np.int64)
        layers.append((layer_of(index, experts, top_k), ids, prefill))
    requests = requests_of(phase, ["a"] * len(lengths), lengths, layers)
    return requests, random.permutation(len(lengths))[:number].reshape(-1, size)


def by_loops(requests, batches, place):
    """Counts of each step of each batch in a layer, and tokens of the steps."""
    one, found = requests.layers[place], []
    for batch in batches.tolist():
        steps: dict[int, Counter[int]] = {}
        tokens: Counter[int] = Counter()
        for request, turn, ids in zip(one.request, one.turn, one.ids.tolist(), strict=True):
            if request in batch:
                tokens[turn] += 1
                steps.setdefault(turn, Counter()).update(i for i in ids if i >= 0)
        for turn in sorted(steps):
            found.append(([steps[turn][e] for e in range(one.layer.experts)], tokens[turn]))
    return found


@given(composed(), st.integers(1, 5))
def test_steps_and_figures_equal_loops(case, ranks):
    requests, batches = case
    batch_of_step, counts = batch_step_counts(requests, batches)
    made = waits(requests, batches, ranks)
    weighted = tokens = worst = fair = 0.0
    cells: list[int] = []
    for place, one in enumerate(requests.layers):
        steps = by_loops(requests, batches, place)
        assert counts[place].tolist() == [load for load, _ in steps]
        assert len(batch_of_step) == len(steps) == made.steps
        homes = [int(rank) for rank in np.repeat(range(ranks), _dealt(one.layer.experts, ranks))]
        for load, number in steps:
            cells += [count for count in load if count]
            on_ranks = [0] * ranks
            for count, home in zip(load, homes, strict=True):
                on_ranks[home] += count
            worst, fair = worst + max(on_ranks), fair + mean(on_ranks)
            if sum(load):
                weighted, tokens = weighted + number * max(load) / mean(load), tokens + number
    assert made.imbalance_ratio == pytest.approx(
        weighted / tokens if tokens else np.nan, nan_ok=True
    )
    assert made.straggler_factor == pytest.approx(worst / fair if fair else np.nan, nan_ok=True)
    sizes = (mean(cells), median(cells)) if cells else (np.nan, np.nan)
    assert made.tokens_per_expert == pytest.approx(sizes, nan_ok=True)
    small = sum(count < 16 for count in cells) / len(cells) if cells else np.nan
    assert made.small_gemm_share == pytest.approx(small, nan_ok=True)


def _dealt(experts, ranks):
    return [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]


@given(composed())
def test_requests_outside_the_batches_wait_for_nothing(case):
    requests, batches = case
    made = waits(requests, batches, 2)
    outside = np.setdiff1d(np.arange(len(requests.names)), batches)
    assert not made.expert[outside].any()
    assert not made.rank[outside].any()


def test_large_cells_are_not_small():
    ids = np.repeat([[0], [1]], [15, 16], axis=0)
    prefill = np.zeros((1, 2), dtype=np.int64)
    requests = requests_of("prefill", ["a"], np.array([31]), [(layer_of(0, 2, 1), ids, prefill)])
    assert waits(requests, np.array([[0]]), 1).small_gemm_share == 0.5


# -- composing


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_request_is_in_one_batch(size):
    random = np.random.default_rng(0)
    members = random.permutation(40)[:12]
    expected = random.random((12, 5))
    for batches in (
        fifo(members, size),
        shuffled(members, size, random),
        load_aware(members, expected, size),
    ):
        assert batches.shape == (12 // size, size)
        assert sorted(batches.ravel()) == sorted(members)
    assert fifo(members, size).ravel().tolist() == members.tolist()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_classes_on_experts_of_their_own(classes, phase):
    """In blocks a batch is as bad as its classes are many; mixed it is perfect."""
    experts, each = 8, 8
    own = experts // classes
    names = blocks(each, "abcd"[:classes])
    ids = np.repeat(np.arange(experts).reshape(classes, own), each * 5, axis=0)
    prefill = np.zeros((len(names), experts), dtype=np.int64)
    lengths = np.full(len(names), 5)
    requests = requests_of(phase, names, lengths, [(layer_of(0, experts, own), ids, prefill)])
    made = compare_requests(requests, [classes], ranks=classes)
    figures = {one.policy: one for one in made.policies}
    assert made.known_by == "tag"
    assert figures["fifo"].imbalance_ratio == figures["fifo"].straggler_factor == classes
    assert figures["load_aware"].imbalance_ratio == figures["load_aware"].straggler_factor == 1.0
    assert 1.0 < figures["random"].straggler_factor < classes
    found = figures["load_aware"].gains["straggler_factor"]
    known = len(names) >= FEWEST_REQUESTS
    assert found.value == classes
    assert (found.verdict, found.lower) == (
        ("gain", classes) if known else ("unknown", found.lower)
    )
    assert (made.signatures.within, made.signatures.between) == (0.0, 1.0)


def test_all_policies_have_the_same_requests_in_full_batches():
    requests = random_requests(np.random.default_rng(1), blocks(9), SIGNATURES)
    made = compare_requests(requests, [4, 6], ranks=4)
    assert [(one.policy, one.batch_size) for one in made.policies] == [
        (policy, size) for size in (4, 6) for policy in ("fifo", "random", "load_aware")
    ]
    # Halves of 14 and 13: three batches of 4 each, two of 6.
    assert [one.requests for one in made.policies] == [24] * 6
    assert [one.batches for one in made.policies] == [6] * 3 + [4] * 3


def test_one_batch_has_nothing_to_choose():
    requests = random_requests(np.random.default_rng(1), blocks(4), SIGNATURES)
    made = compare_requests(requests, [6], ranks=4)
    assert [one.gains for one in made.policies] == [None] * 3
    assert len({one.straggler_factor for one in made.policies}) == 1


def test_the_same_seed_gives_the_same():
    requests = random_requests(np.random.default_rng(1), blocks(8), SIGNATURES)
    first, second, other = (
        compare_requests(requests, [4], ranks=4, seed=seed).policies for seed in (3, 3, 4)
    )
    assert first == second != other


# -- what may be known


@pytest.fixture
def expected_by(monkeypatch):
    """What load-aware composition was told, call by call."""
    seen = []

    def spy(members, expected, size):
        seen.append((members, expected))
        return load_aware(members, expected, size)

    monkeypatch.setattr(batching, "load_aware", spy)
    return seen


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_judged_requests_are_not_fitted_on(expected_by, phase):
    random = np.random.default_rng(2)
    requests = random_requests(random, blocks(8), SIGNATURES, phase=phase)
    compare_requests(requests, [4], ranks=4)
    first, second = expected_by
    assert sorted([*first[0], *second[0]]) == list(range(24))
    for number, (members, expected) in enumerate([first, second]):
        expected_by.clear()
        compare_requests(with_ids_of(requests, members, random), [4], ranks=4)
        again, others = expected_by[number], expected_by[1 - number]
        assert again[0].tolist() == members.tolist()
        assert again[1].tolist() == expected.tolist()
        assert others[1].tolist() != (first, second)[1 - number][1].tolist()


def test_without_tags_the_prefill_tells_and_the_decode_does_not(expected_by):
    random = np.random.default_rng(2)
    requests = random_requests(random, ["untagged"] * 24, SIGNATURES[:, :1], alike=1.0)
    made = compare_requests(requests, [4], ranks=4)
    assert made.known_by == "prefill"
    ((members, expected),) = expected_by
    expected_by.clear()
    compare_requests(with_ids_of(requests, members, random), [4], ranks=4)
    assert expected_by[0][1].tolist() == expected.tolist()


def test_nothing_tells_prefills_without_tags_apart():
    requests = random_requests(
        np.random.default_rng(2), ["untagged"] * 24, SIGNATURES[:, :1], phase="prefill"
    )
    made = compare_requests(requests, [4], ranks=4)
    assert made.known_by is None
    assert [one.policy for one in made.policies] == ["fifo", "random"]


def test_what_is_expected_of_a_class_is_its_mean_share():
    requests = random_requests(np.random.default_rng(4), [*blocks(4), "alone"], SIGNATURES_OF_4)
    fit, judged = np.arange(0, 12, 2), np.array([1, 5, 12])
    expected = expected_by_class(requests, fit, judged, 2)
    columns = []
    for one in requests.layers:
        shares = []
        for request in range(13):
            count = Counter(one.ids[one.request == request].ravel().tolist())
            shares.append([count[e] / count.total() for e in range(8)])
        rows = [
            np.mean([shares[f] for f in fit if requests.classes[f] == name], axis=0)
            for name in ("a", "b")
        ]
        rows.append(np.mean([shares[f] for f in fit], axis=0))  # of a class that nobody saw
        on_ranks = [[row[:4].sum() - 0.5, row[4:].sum() - 0.5] for row in rows]
        columns += [np.array(rows) - 1 / 8, np.array(on_ranks)]
    assert expected == pytest.approx(np.concatenate(columns, axis=1))


SIGNATURES_OF_4 = np.random.default_rng(5).dirichlet(np.full(8, 0.4), size=(2, 4))


def test_a_prefill_that_was_not_recorded_tells_the_mean():
    requests = random_requests(np.random.default_rng(4), ["untagged"] * 6, SIGNATURES[:1, :1])
    requests.layers[0].prefill[2] = 0
    expected = expected_by_prefill(requests, np.arange(6), 2)
    assert expected[2] == pytest.approx(np.delete(expected, 2, axis=0).mean(axis=0))


def test_signatures_equal_loops():
    classes = ["b", "a", "b", "b", "c"]
    requests = random_requests(np.random.default_rng(7), classes, SIGNATURES)
    made = signatures(requests)
    assert [(one.name, one.requests) for one in made.classes] == [("a", 1), ("b", 3), ("c", 1)]
    assert np.isnan([made.classes[0].within, made.classes[2].within]).all()
    shares = [
        np.array([np.bincount(one.ids[one.request == r].ravel(), minlength=8) for r in range(5)])
        / (2 * requests.tokens[:, None])
        for one in requests.layers
    ]
    pairs = {
        (r, q): np.mean([_jensen_shannon(share[r], share[q]) for share in shares])
        for r in range(5)
        for q in range(r)
    }
    within = [pairs[pair] for pair in ((2, 0), (3, 0), (3, 2))]
    assert made.within == made.classes[1].within == pytest.approx(np.mean(within))
    between = [value for pair, value in pairs.items() if pair not in ((2, 0), (3, 0), (3, 2))]
    assert made.between == pytest.approx(np.mean(between))
    of_b = made.classes[1]
    for own, share in zip(of_b.shares, shares, strict=True):
        assert own == pytest.approx(share[[0, 2, 3]].mean(axis=0))
    largest = sorted(np.concatenate(of_b.shares))[::-1][:3]
    assert [part for _, _, part in of_b.top] == pytest.approx(largest)
    assert all(of_b.shares[layer][expert] == part for layer, expert, part in of_b.top)


def _jensen_shannon(p, q):
    total = 0.0
    for one in (p, q):
        middle = (p + q) / 2
        total += sum(0.5 * x * np.log2(x / m) for x, m in zip(one, middle, strict=True) if x > 0)
    return total


# -- how sure it is


def test_the_interval_of_a_mean_is_the_textbooks():
    random = np.random.default_rng(0)
    old = random.gamma(4.0, size=400)
    found = gain(old, np.ones(400), ["a"] * 400, random)
    half = 1.96 * old.std(ddof=1) / 20
    assert found.value == pytest.approx(old.mean())
    assert (found.upper - found.lower) / 2 == pytest.approx(half, rel=0.08)


def test_differences_between_classes_are_no_doubt():
    old = np.repeat([1.0, 5.0], 20)
    found = gain(old, np.ones(40), blocks(20, "ab"), np.random.default_rng(0))
    assert (found.lower, found.value, found.upper) == pytest.approx((3.0, 3.0, 3.0))
    mixed = gain(old, np.ones(40), ["a"] * 40, np.random.default_rng(0))
    assert mixed.lower < 2.5
    assert mixed.upper > 3.5


def test_small_classes_vary_as_much_as_they_should():
    """In classes of two, drawing two of two would halve the variance."""
    old = np.tile([1.0, 3.0], 100)
    names = [str(number // 2) for number in range(200)]
    found = gain(old, np.ones(200), names, np.random.default_rng(0))
    half = 1.96 * np.sqrt(100 * 2 * 2.0) / 200  # 100 sums of two with variance 2 each
    assert (found.upper - found.lower) / 2 == pytest.approx(half, rel=0.08)


def test_classes_of_one_are_taken_together():
    old = np.arange(20.0)
    alone = gain(old, np.ones(20), [str(n) for n in range(20)], np.random.default_rng(0))
    assert alone == gain(old, np.ones(20), ["a"] * 20, np.random.default_rng(0))
    one = gain(old, np.ones(20), ["a"] * 19 + ["b"], np.random.default_rng(0))
    assert one == alone


def test_verdicts():
    random = np.random.default_rng(0)
    noise, even = random.normal(size=60) / 10, np.ones(60)
    assert gain(even + noise + 1, even, ["a"] * 60, random).verdict == "gain"
    assert gain(even + noise - 0.5, even, ["a"] * 60, random).verdict == "loss"
    assert gain(even, even, ["a"] * 60, random).verdict == "none shown"
    few = gain(even[:19] + 1, even[:19], ["a"] * 19, random)
    assert (few.value, few.verdict) == (2.0, "unknown")


RUNS = 100


def simulated(classes: list[str], signatures: np.ndarray, phase: str):
    """Gains in repeated draws of requests: by policy and figure, [runs, value and interval]."""
    figures: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for run in range(RUNS):
        requests = random_requests(
            np.random.default_rng(run), classes, signatures, phase=phase, alike=8.0
        )
        made = compare_requests(requests, [8], ranks=4, seed=run, orders=4)
        for one in made.policies:
            for name in ("imbalance_ratio", "straggler_factor"):
                found = one.gains[name] if one.gains else None
                interval = (found.value, found.lower, found.upper) if found else (1.0, 1.0, 1.0)
                row = (getattr(one, name), *interval)
                figures.setdefault((one.policy, name), []).append(row)
    return {key: np.array(rows) for key, rows in figures.items()}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_intervals_cover_the_truth_at_their_level(phase):
    seen = simulated(blocks(16), SIGNATURES, phase)
    for (policy, name), rows in seen.items():
        if policy == "fifo":
            continue
        truth = seen["fifo", name][:, 0].mean() / rows[:, 0].mean()
        covered = (rows[:, 2] <= truth) & (truth <= rows[:, 3])
        assert truth > 1.1
        # 95 % less three standard errors of so few runs; more is cautious, within bounds.
        assert covered.mean() >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / RUNS), (policy, name)
        assert (rows[:, 3] - rows[:, 2]).mean() < 2 * 3.92 * rows[:, 1].std(), (policy, name)


def test_where_there_is_nothing_to_gain_none_is_claimed():
    """Requests of one kind: any order is as good as another."""
    seen = simulated(["a"] * 48, SIGNATURES[:, :1], "decode")
    for name in ("imbalance_ratio", "straggler_factor"):
        _, value, lower, upper = seen["random", name].T
        assert value.mean() == pytest.approx(1.0, abs=0.01)
        assert ((lower > 1) | (upper < 1)).mean() <= 0.05 + 3 * np.sqrt(0.95 * 0.05 / RUNS)


# -- bad input


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"batch_sizes": [7]}, "batch size 7 is more than the 6 requests in each half"),
        ({"batch_sizes": [0]}, "1 or more"),
        ({"batch_sizes": []}, "1 or more"),
        ({"batch_sizes": None}, "batch size 8 is more than the 6"),
        ({"batch_sizes": [2], "ranks": 9}, "at most 8 ranks"),
        ({"batch_sizes": [2], "ranks": 0}, "ranks is 0"),
        ({"batch_sizes": [2], "orders": 0}, "orders is 0"),
    ],
)
def test_what_cannot_be_is_refused(asked, says):
    requests = random_requests(np.random.default_rng(0), blocks(4), SIGNATURES)
    with pytest.raises(UsageError, match=says):
        compare_requests(requests, **{"ranks": 4, **asked})
