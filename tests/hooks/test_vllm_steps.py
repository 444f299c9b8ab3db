"""What the vLLM hook makes of its scheduler's words, without vLLM.

``Output`` and the runners are stand-ins of the shapes that vLLM 0.32 has. Model Runner V2 cannot
be run here: it needs a Triton with a CPU backend, which PyPI does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import routeprof
from routeprof.hooks.session import Session, Settings, open_session
from routeprof.hooks.vllm import Watch, shares_rows
from routeprof.hooks.vllm_layers import FoundRunner
from routeprof.hooks.vllm_steps import Requests, Step, own_rows
from routeprof.topology import Layer, ModelInfo, RankRole

# -- stand-ins for what the scheduler hands out


@dataclass
class New:
    """A request that is scheduled for the first time."""

    req_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int = 0
    prompt_embeds: Any = None
    prefill_token_ids: list[int] | None = None


@dataclass
class Known:
    """Requests that were scheduled before."""

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Output:
    """One step."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Known = field(default_factory=Known)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def new(name: str, prompt: int, cached: int = 0, **other: Any) -> New:
    return New(name, [7] * prompt, cached, **other)


def prefill(*requests: New) -> Output:
    """A step that computes what is not cached of these prompts."""
    due = {one.req_id: len(one.prompt_token_ids) - one.num_computed_tokens for one in requests}
    return Output(due, list(requests))


def going_on(counts: dict[str, tuple[int, int]], resumed: tuple[str, ...] = (), **other) -> Output:
    """A step of known requests: for each, tokens computed and tokens to compute."""
    known = Known(list(counts), [computed for computed, _ in counts.values()], set(resumed))
    scheduled = {name: count for name, (_, count) in counts.items()}
    return Output(scheduled, scheduled_cached_reqs=known, **other)


# -- phases


def phases(*outputs: Output) -> list[str]:
    requests = Requests()
    return [requests.read(output).phase for output in outputs]


def test_a_prompt_of_one_token_is_prefill():
    assert phases(prefill(new("a", 1)), going_on({"a": (1, 1)})) == ["prefill", "decode"]


def test_the_last_token_of_a_chunked_prompt_is_prefill():
    first = Output({"a": 8}, [new("a", 9)])
    assert phases(first, going_on({"a": (8, 1)}), going_on({"a": (9, 1)})) == [
        "prefill",
        "prefill",
        "decode",
    ]


def test_all_but_the_last_token_cached_is_prefill():
    assert phases(prefill(new("a", 33, cached=32))) == ["prefill"]


def test_prompts_beside_answers_are_mixed():
    both = going_on({"a": (5, 1)})
    both.scheduled_new_reqs = [new("b", 4)]
    both.num_scheduled_tokens["b"] = 4
    assert phases(prefill(new("a", 5)), both, going_on({"a": (6, 1), "b": (4, 1)})) == [
        "prefill",
        "mixed",
        "decode",
    ]


@pytest.mark.parametrize("cached", [0, 4, 8])
def test_starting_again_after_preemption_is_prefill(cached: int):
    """Whether or not the prompt, of 5 tokens, is in the prefix cache by now."""
    requests = Requests()
    requests.read(prefill(new("a", 5)))
    for position in range(5, 9):
        requests.read(going_on({"a": (position, 1)}))
    again = going_on({"a": (cached, 10 - cached)}, resumed=("a",))
    assert requests.read(again).phase == "prefill"
    assert requests.read(going_on({"a": (10, 1)})).phase == "decode"
    assert (requests.preempted, requests.cached_tokens) == (1, cached)


def test_the_second_runner_is_told_of_preempted_requests_as_if_new():
    requests = Requests()
    requests.read(prefill(new("a", 5)))
    requests.read(prefill(new("b", 3)))
    again = New("a", [7] * 5, 0, prefill_token_ids=[7] * 8)
    output = Output({"a": 8, "b": 1}, [again], Known(["b"], [3]))
    step = requests.read(output)
    assert step.phase == "mixed"
    assert requests.preempted == 1
    request, _ = requests.rows(step, ["a", "b"])
    assert request.tolist() == [0] * 8 + [1]


def test_drafts_are_verified():
    drafts = {"a": [1, 2, 3]}
    verify = going_on({"a": (5, 4), "b": (5, 1)}, scheduled_spec_decode_tokens=drafts)
    assert phases(prefill(new("a", 5), new("b", 5)), verify) == ["prefill", "verify"]


def test_more_than_drafts_is_no_decoding():
    """A prompt that is not through, beside another request's drafts."""
    both = going_on({"a": (5, 3), "b": (4, 4)}, scheduled_spec_decode_tokens={"a": [1, 2]})
    assert phases(Output({"a": 5, "b": 4}, [new("a", 5), new("b", 9)]), both)[-1] == "mixed"


def test_embeddings_have_a_length_too():
    request = New("a", None, prompt_embeds=torch.zeros(3, 8))
    steps = (Output({"a": 2}, [request]), going_on({"a": (2, 1)}), going_on({"a": (3, 1)}))
    assert phases(*steps) == ["prefill", "prefill", "decode"]


# -- rows


def test_rows_follow_the_batch():
    requests = Requests()
    requests.read(prefill(new("a", 2), new("b", 3)))
    step = Step(6, "mixed", {"a": 2, "c": 1, "b": 3}, {"a": 1, "b": 2, "c": 3})
    request, position = requests.rows(step, ["b", "idle", "a", "c"])
    assert request.tolist() == [1, 1, 0, -1, -1, -1]
    assert position.tolist() == [3, 4, 2, 1, 2, 3]


def test_requests_are_numbered_in_the_order_of_arrival():
    requests = Requests()
    requests.read(prefill(new("a", 2)))
    requests.read(prefill(new("b", 2)))
    output = prefill(new("a", 2))  # the name of one that is over
    output.finished_req_ids = {"a"}
    step = requests.read(output)
    assert requests.rows(step, ["a"])[0].tolist() == [2, 2]
    assert requests.preempted == 0


# -- whose rows they are


@dataclass(frozen=True)
class Group:
    """Data-parallel ranks of tensor-parallel ranks.

    Attributes:
        real, padded: rows of each data-parallel rank.
    """

    real: tuple[int, ...]
    padded: tuple[int, ...]
    tp: int

    def rows(self, dp: int) -> list[Any]:
        """Labels of a rank's rows; None for padding."""
        padding = self.padded[dp] - self.real[dp]
        return [(dp, row) for row in range(self.real[dp])] + [None] * padding

    def shard(self, dp: int, tp: int) -> list[Any]:
        """The part that a tensor-parallel rank has under sequence parallelism."""
        size = -(-self.padded[dp] // self.tp)
        rows = self.rows(dp) + [None] * (size * self.tp - self.padded[dp])
        return rows[tp * size : (tp + 1) * size]

    def ranks(self) -> Iterator[tuple[int, int]]:
        return product(range(len(self.real)), range(self.tp))


def groups() -> Iterator[Group]:
    """All small groups: real rows of 0 to 5, padded by up to 2, never to nothing."""
    for ranks, tp in ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2)):
        sizes = range(6) if ranks < 3 else (0, 1, 4)
        for real in product(sizes, repeat=ranks):
            for padding in range(3):
                padded = tuple(max(1, rows + padding) for rows in real)
                yield Group(real, padded, tp)


def gathered(group: Group, dp: int, tp: int) -> list[Any]:
    return [row for one in range(len(group.real)) for row in group.rows(one)]


def gathered_shards(group: Group, dp: int, tp: int) -> list[Any]:
    return [row for one in group.ranks() for row in group.shard(*one)]


LAYOUTS = {
    "own": lambda group, dp, tp: group.rows(dp),
    "gathered": gathered,
    "shard": lambda group, dp, tp: group.shard(dp, tp),
    "gathered shards": gathered_shards,
}
"""The rows that a router of rank (dp, tp) sees."""


def counted(group: Group, layout: str, dp: int, tp: int) -> list[Any]:
    """The rows that rank (dp, tp) counts, as ``EngineCapture`` reads the answer."""
    sharded = "shard" in layout
    seen = LAYOUTS[layout](group, dp, tp)
    sizes = [len(group.shard(*one)) for one in group.ranks()] if sharded else None
    start, stop, offset = own_rows(len(seen), group.padded, sizes, dp, tp, group.tp, sharded)
    own, real = seen[start:stop], group.real[dp]
    return [row for place, row in enumerate(own) if 0 <= place - offset < real]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_is_counted_once(layout: str):
    for group in groups():
        owners = [one for one in group.ranks() if "shard" in layout or one[1] == 0]
        rows = [row for one in owners for row in counted(group, layout, *one)]
        expected = [(dp, row) for dp, real in enumerate(group.real) for row in range(real)]
        assert None not in rows, group
        assert sorted(rows) == expected, group


@pytest.mark.parametrize(
    ("asked", "layers", "shares"),
    [(True, [True, True], True), (True, [False, False], False), (False, [False], False)],
)
def test_ranks_share_rows_where_settings_and_model_do(
    asked: bool, layers: list[bool], shares: bool
):
    runners = [
        SimpleNamespace(moe_config=SimpleNamespace(is_sequence_parallel=own)) for own in layers
    ]
    found = [FoundRunner(Layer(0, "layers.0"), runner) for runner in runners]
    assert shares_rows(found, SimpleNamespace(use_sequence_parallel_moe=asked)) is shares


def test_experts_without_settings_of_their_own_share_rows_as_asked():
    found = [FoundRunner(Layer(0, "layers.0"), object())]
    assert shares_rows(found, SimpleNamespace(use_sequence_parallel_moe=True))


def test_a_batch_that_fits_no_layout_is_refused():
    with pytest.raises(ValueError, match=r"7 routed rows fit no data-parallel layout of \[4, 8\]"):
        own_rows(7, [4, 8], None, 0, 0, 1, False)


# -- a runner that is watched

EXPERTS, TOP_K = 4, 2


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    layer = Layer(0, "layers.0.mlp", experts=EXPERTS, top_k=TOP_K, router="softmax")
    settings = Settings(tmp_path / "recording", level="tokens", gate=False, window=3600.0)
    session = open_session(settings, [layer], ModelInfo(), RankRole(), torch.device("cpu"))
    yield session
    session.recording.stop()


class FirstRunner:
    """In the shape of ``v1/worker/gpu_model_runner.py``: it keeps its batch to itself."""

    def __init__(self, session: Session) -> None:
        self.session, self.served = session, 0
        self.input_batch = SimpleNamespace(req_ids=[])

    def _prepare_inputs(self, output: Output, counts: Any) -> str:
        self.input_batch.req_ids = sorted(output.num_scheduled_tokens, reverse=True)
        return "inputs"

    def execute_model(self, scheduler_output: Output, intermediate_tensors: Any = None) -> int:
        if scheduler_output.total_num_scheduled_tokens:
            assert self._prepare_inputs(scheduler_output, None) == "inputs"
            self.route(scheduler_output.total_num_scheduled_tokens)
        return self.served

    def route(self, rows: int) -> None:
        """What a router does: row r goes to experts r and r + 1."""
        ids = torch.arange(rows)[:, None] + torch.arange(TOP_K)
        self.session.capture.count(0, ids % EXPERTS)
        self.served += 1

    def prepared(self) -> bool:
        return bool(self.input_batch.req_ids)


class SecondRunner(FirstRunner):
    """In the shape of ``v1/worker/gpu/model_runner.py``: warm-up comes the same way as requests."""

    _prepare_inputs = None

    def prepare_inputs(self, output: Output, state: Any, *others: Any) -> SimpleNamespace:
        return SimpleNamespace(req_ids=sorted(output.num_scheduled_tokens, reverse=True))

    def execute_model(
        self, scheduler_output: Output, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> int:
        if not dummy_run:
            self.prepare_inputs(scheduler_output, None)
        self.route(scheduler_output.total_num_scheduled_tokens)
        return self.served


def watched(session: Session, kind: type[FirstRunner]) -> FirstRunner:
    runner = kind(session)
    Watch(session, RankRole()).around(runner)
    return runner


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
def test_steps_rows_and_phases(session: Session, kind: type[FirstRunner]):
    runner = watched(session, kind)
    assert runner.execute_model(prefill(new("a", 2), new("b", 3))) == 1
    assert runner.execute_model(going_on({"a": (2, 1), "b": (3, 1)})) == 2
    session.recording.stop()
    profile = routeprof.load(session.recording.directory)
    steps, tokens = profile.step_counts(), profile.tokens(0)
    assert steps.phase.tolist() == ["prefill", "decode"]
    assert steps.tokens.tolist() == [5, 2]
    assert steps.requests.tolist() == [2, 2]
    assert tokens.request.tolist() == [1, 1, 1, 0, 0, 1, 0]
    assert tokens.position.tolist() == [0, 1, 2, 0, 1, 3, 2]
    expected = [rows % EXPERTS for rows in (0, 1, 2, 3, 4, 0, 1)]
    assert tokens.ids[:, 0].tolist() == expected
    assert profile.coverage == 1.0


def test_dummy_runs_are_no_steps(session: Session):
    runner = watched(session, SecondRunner)
    served = prefill(new("a", 2))
    runner.execute_model(served, dummy_run=True)
    runner.execute_model(served, None, True)
    runner.execute_model(served, None)
    session.recording.stop()
    assert routeprof.load(session.recording.directory).step_counts().tokens.tolist() == [2]


def test_passes_outside_steps_are_not_counted(session: Session):
    runner = watched(session, FirstRunner)
    runner.route(8)
    runner.execute_model(prefill(new("a", 3)))
    runner.route(8)
    session.recording.stop()
    profile = routeprof.load(session.recording.directory)
    assert np.asarray(profile.counts).sum() == 3 * TOP_K


def test_a_step_without_tokens_is_none(session: Session):
    runner = watched(session, FirstRunner)
    runner.execute_model(Output({}))
    runner.execute_model(prefill(new("a", 3)))
    session.recording.stop()
    assert routeprof.load(session.recording.directory).step_counts().tokens.tolist() == [3]


def test_a_failed_step_counts_for_nothing(session: Session):
    class Failing(FirstRunner):
        def route(self, rows: int) -> None:
            super().route(rows)
            if self.served == 1:
                raise RuntimeError("out of memory")

    runner = watched(session, Failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(prefill(new("a", 7)))
    runner.execute_model(prefill(new("b", 3)))
    session.recording.stop()
    profile = routeprof.load(session.recording.directory)
    assert np.asarray(profile.counts).sum() == 3 * TOP_K
    assert profile.tokens(0).request.tolist() == [1, 1, 1]


def test_what_we_do_not_understand_stays_ours(session: Session):
    """The engine serves on, and the recording says what went wrong."""
    runner = watched(session, FirstRunner)
    output = prefill(new("a", 3))
    output.scheduled_spec_decode_tokens = None
    assert runner.execute_model(output) == 1
    session.recording.stop()
    profile = routeprof.load(session.recording.directory)
    assert profile.files.ranks[0].state.problems["hook_failures"] == 1
