"""Each finding has a recording that triggers it alone, and one that just does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof.diagnose import DEFAULTS
from routeprof.diagnose.examine import examine
from routeprof.diagnose.question import Question
from routeprof.topology import RankRole
from tests.diagnose.made import (
    EXPERTS,
    MODEL,
    Step,
    apportioned,
    halves,
    moe,
    one_hot,
    record,
    steady,
)

Make = Callable[[Path, Any], Path]


@dataclass(frozen=True)
class Case:
    """A kind of recording, made from one number.

    Attributes:
        above, below: the number that triggers the finding, and one that just does not.
        ask: further arguments of the question, made from the directory.
    """

    code: str
    make: Make
    above: Any
    below: Any
    ask: Callable[[Path, Any], dict] = lambda root, value: {}


def untagged(shares: Callable[[Any], Any], **facts) -> Make:
    return lambda root, value: record(root / "run", steady(shares(value)), **facts)


def two_tags(first: int, second: int) -> Make:
    """Tags with a hot expert each."""

    def make(root: Path, value: float) -> Path:
        steps = steady(one_hot(value, first), 16, tag="code")
        return record(root / "run", steps + steady(one_hot(value, second), 16, tag="prose"))

    return make


def alternating(root: Path, value: float) -> Path:
    steps = [steady(one_hot(value, number % EXPERTS), 1)[0] for number in range(32)]
    return record(root / "run", steps)


def top_two(share: float) -> np.ndarray:
    shares = np.full(EXPERTS, (1 - share) / (EXPERTS - 2))
    shares[[3, 9]] = share / 2
    return shares


def cold(ratio: float) -> np.ndarray:
    shares = np.ones(EXPERTS)
    shares[0], shares[1] = 2.0, 2.0 / ratio
    return shares


def last_gets(tokens: int) -> Make:
    def make(root: Path, value: int) -> Path:
        counts = apportioned([*np.ones(EXPERTS - 1), 0], 512 - value)
        counts[-1] = value
        even = apportioned(np.ones(EXPERTS), 512)
        return record(root / "run", [Step([counts, even])] * tokens)

    return make


def below_a_tile(root: Path, experts: int) -> Path:
    counts = [15] * experts + [16] * (EXPERTS - experts)
    counts[-1] += sum(counts) % 2
    return record(root / "run", [Step([counts, counts])] * 8)


def dropping(root: Path, invalid: int) -> Path:
    counts = apportioned(np.ones(EXPERTS), 1000 - invalid)
    steps = [Step([counts, counts], invalid=invalid)] * 8
    return record(root / "run", steps, layers=[moe(0, drops=True), moe(1, drops=True)])


def one_expert_gets(root: Path, count: int) -> Path:
    rest = apportioned(np.ones(EXPERTS - 1), 512 - count)
    return record(root / "run", [Step([[*rest, count], [*rest, count]])] * 8)


def neighbours(times: float) -> np.ndarray:
    """The experts of the first of four ranks get so many times the mean."""
    return np.array([times] * 4 + [(4 - times) / 3] * 12)


def four_ranks(root: Path, away: int) -> Path:
    """Two nodes of two ranks. Of 64 tokens so many choose both ranks of the other node, and the
    others one there and one beside their own."""
    for rank in range(4):
        beside, there = rank ^ 1, 2 * (1 - rank // 2)
        ids = np.array(
            [
                (4 * there + token % 4, 4 * (there + 1) + token % 4)
                if token < away
                else (4 * beside + token % 4, 4 * (there + token // 4 % 2) + token % 4)
                for token in range(64)
            ]
        )
        counts = np.bincount(ids.ravel(), minlength=EXPERTS)
        record(
            root / "run",
            [Step([counts, counts], ids=ids)] * 8,
            level="tokens",
            role=RankRole(rank, 4, ep=rank, dp=rank),
            host=f"node{rank // 2}",
        )
    return root / "run"


def moved(root: Path, value: float) -> Path:
    steps = steady(halves(value), 16) + steady(halves(2 - value), 16)
    return record(root / "run", steps)


def since(root: Path, value: float) -> dict:
    before = record(root / "before", steady(np.ones(EXPERTS)))
    return {"since": routeprof.load(before)}


def even(root: Path, tokens: int) -> Path:
    return record(root / "run", steady(np.ones(EXPERTS), 8, tokens))


def hook_that_runs(root: Path, value: bool) -> Path:
    counts = apportioned(np.ones(EXPERTS), 512)
    return record(root / "run", [Step([counts, counts if value else None])] * 8)


def expecting(root: Path, tokens: int) -> Path:
    counts = apportioned(np.ones(EXPERTS), 512)
    return record(root / "run", [Step([counts, counts], expected=tokens)] * 8)


def with_problem(name: str) -> Make:
    return lambda root, value: record(
        root / "run", steady(np.ones(EXPERTS)), problems={name: value}
    )


def ranks(root: Path, present: int) -> Path:
    for rank in range(present):
        place = RankRole(rank, 2, dp=rank, ep=rank)
        record(root / "run", steady(np.ones(EXPERTS), 8), role=place)
    return root / "run"


def without_part(root: Path, missing: bool) -> Path:
    directory = record(root / "run", steady(np.ones(EXPERTS)))
    if missing:
        (directory / "rank-00000" / "steps-000000.parquet").unlink()
    return directory


def as_jamba(experts: int) -> Make:
    """Two layers that route, of which every so many attends and the others are Mamba."""

    def make(root: Path, period: int) -> Path:
        config = {
            **dict.fromkeys(["vocab_size", "intermediate_size", "hidden_size"], 64),
            **dict.fromkeys(["mamba_expand", "mamba_d_state", "mamba_d_conv"], 2),
            "model_type": "jamba",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "attn_layer_period": period,
            "attn_layer_offset": 0,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
        }
        steps = steady(np.ones(EXPERTS))
        return record(root / "run", steps, model=replace(MODEL, config=config))

    return make


CASES = [
    Case("hot-experts", untagged(one_hot), 3.1, 2.95),
    Case("collapse", untagged(top_two), 0.82, 0.79),
    Case("hot-cold", untagged(cold), 3.3, 2.8),
    Case("dead-experts", last_gets(8), 0, 1),
    Case("narrow-input", two_tags(0, 8), 3.1, 2.95),
    Case("model-skew", two_tags(5, 5), 3.1, 2.95),
    Case("step-skew", alternating, 3.1, 2.95),
    Case("small-gemms", below_a_tile, 9, 8),
    Case("overflow", dropping, 11, 10),
    Case(
        "overflow",
        one_expert_gets,
        46,
        45,
        lambda root, value: {"limits": DEFAULTS.changed(capacity_factor=1.25)},
    ),
    Case("rank-imbalance", untagged(neighbours), 1.25, 1.19, lambda root, value: {"gpus": 4}),
    Case("cross-node", four_ranks, 4, 0),
    Case("drift-since", untagged(halves), 1.6, 1.45, since),
    Case("drift-within", moved, 1.3, 1.2),
    Case(
        "low-margin",
        lambda root, value: record(root / "run", steady(np.ones(EXPERTS)), margin=value),
        0.0031,
        0.0032,
    ),
    Case("slower-than-dense", even, 190 * 8, 200 * 8),
    Case("hybrid", as_jamba(EXPERTS), 2, 1),
    Case("hybrid", as_jamba(EXPERTS // 2), 2, 1),
    Case("silent-layers", hook_that_runs, False, True),
    Case("coverage", expecting, 257, 256),
    Case("missed-passes", with_problem("missed_passes"), 1, 0),
    Case("hook-failures", with_problem("hook_failures"), 1, 0),
    Case("ranks-missing", ranks, 1, 2),
    Case("missing-parts", without_part, True, False),
]
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)


def severities(case: Case, root: Path, value: Any) -> dict[str, str]:
    """Severity of each finding by its code."""
    directory = case.make(root, value)
    question = Question(routeprof.load(directory), hardware="h100", **case.ask(root, value))
    return {finding.code: finding.severity for finding in examine(question, gains=False).findings}


@ALL
def test_it_is_found_alone(case: Case, tmp_path: Path):
    found = severities(case, tmp_path, case.above)
    assert case.code in found
    assert {code for code, severity in found.items() if severity != "info"} <= {case.code}


@ALL
def test_it_is_not_found_just_below(case: Case, tmp_path: Path):
    assert case.code not in severities(case, tmp_path, case.below)


def test_every_rule_that_asks_more_than_a_table_of_layers_has_a_case():
    from routeprof.diagnose.examine import GAINS, RULES

    assert {*RULES, *GAINS} <= {case.code for case in CASES}
