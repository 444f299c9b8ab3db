"""Two tensor-parallel workers: both see every token, one of them owns it.

Data and expert parallelism do not run on vLLM's CPU backend; whose rows are whose there is tested
without an engine, in ``tests/hooks/test_vllm_steps.py``.
"""

from __future__ import annotations

import pytest

from routeprof.recording.fold import fold
from tests.vllm.conftest import Engines, Run, check_closed_form, counts, scene


@pytest.fixture(scope="module")
def both(engines: Engines) -> Run:
    """Processes as users have them: a driver, an engine core, and two workers."""
    return engines.run(
        "mixtral",
        scene(),
        record={},
        enforce_eager=True,
        tensor_parallel_size=2,
        variables={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )


def test_each_token_once(both: Run):
    check_closed_form(both.profile, both.shape, both.computed)
    assert counts(both.profile) == both.oracle("counts", rank=0)


def test_both_ranks_counted(both: Run):
    first, second = both.profile.files.ranks
    assert [first.state.role.tp, second.state.role.tp] == [0, 1]
    assert [first.owns_tokens, second.owns_tokens] == [True, False]
    assert first.state.pid != second.state.pid
    for number, rank in enumerate((first, second)):
        parts = [part for part in rank.parts if part.kind == "part"]
        own = fold(parts, both.profile.info).lists["counts"].sum(0)
        assert dict(enumerate(own.tolist())) == both.oracle("counts", rank=number)


def test_ranks_table(both: Run):
    table = both.profile.ranks()
    assert table["rank"].tolist() == [0, 1]
    assert table["coverage"].tolist() == [1.0, 1.0]
    assert table["assignments"].nunique() == 1
    assert {finding.severity for finding in both.profile.findings()} <= {"info"}
