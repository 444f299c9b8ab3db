"""The pytest plugin: the fixture ``routing`` and the marker ``routing_limits``.

pytest imports this at every start, so it imports nothing but pytest until a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from routeprof.capture.recorder import Recording
    from routeprof.profile import Profile

MARKER = "routing_limits"
_HELP = (
    f"{MARKER}(max_imbalance=, max_overflow=, max_rank_imbalance=, capacity_factor=, …): what the "
    "fixture `routing` records in this test must pass `routeprof check` with these arguments"
)


class Routing:
    """What a test records.

    Attributes:
        directories: of the recordings, in their order.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.directories: list[Path] = []
        self._factory = factory

    def record(self, model: Any, **options: Any) -> Recording:
        """``routeprof.record`` into a directory of its own; use it in a ``with`` statement.

        Args:
            model: a torch module that holds MoE layers.
            options: as of ``routeprof.record``.
        """
        from routeprof.hooks.transformers import record

        recording = record(model, self._factory.mktemp("routing") / "recording", **options)
        self.directories.append(recording.directory)
        return recording

    def add(self, directory: str | Path) -> Path:
        """Judge a recording that something else writes, such as an engine under test."""
        self.directories.append(Path(directory))
        return self.directories[-1]

    @property
    def profile(self) -> Profile:
        """The newest recording."""
        from routeprof.profile import load

        if not self.directories:
            raise LookupError("nothing is recorded yet: use `with routing.record(model):`")
        return load(self.directories[-1])


_ROUTING: pytest.StashKey[Routing] = pytest.StashKey()


@pytest.fixture
def routing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Routing:
    """Records models: ``with routing.record(model): …``; see the marker ``routing_limits``."""
    made = Routing(tmp_path_factory)
    request.node.stash[_ROUTING] = made
    return made


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _HELP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a wrong marker before the test runs, which may take long."""
    limits = _limits(item)
    if limits is not None:
        _refuse_wrong(limits)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Judge what a marked test recorded, if the test itself passed."""
    result = yield
    limits = _limits(item)
    if limits is not None:
        _judge(item.stash.get(_ROUTING, None), limits)
    return result


def _limits(item: pytest.Item) -> dict[str, Any] | None:
    """The markers' arguments, the nearest counting most; None for a test without one."""
    markers = list(item.iter_markers(MARKER))
    limits: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            pytest.fail(f"{MARKER} takes limits by name, such as max_imbalance=3", pytrace=False)
        limits |= marker.kwargs
    return limits if markers else None


def _refuse_wrong(limits: dict[str, Any]) -> None:
    from routeprof.testing import check_limits

    problem = _problem(check_limits, **limits)
    if problem:
        pytest.fail(f"{MARKER}: {problem}", pytrace=False)


def _judge(routing: Routing | None, limits: dict[str, Any]) -> None:
    from routeprof.testing import assert_balanced

    if routing is None or not routing.directories:
        pytest.fail(
            f"{MARKER}: the test recorded nothing; take the fixture `routing` and run the model "
            "in `with routing.record(model):`",
            pytrace=False,
        )
    for number, directory in enumerate(routing.directories, 1):
        several = len(routing.directories) > 1
        where = f" (recording {number} of {len(routing.directories)})" if several else ""
        problem = _problem(assert_balanced, directory, **limits)
        if problem:
            pytest.fail(f"{MARKER}{where}: {problem}", pytrace=False)


def _problem(check: Callable[..., None], *words: Any, **limits: Any) -> str:
    """What a check says against it; empty if nothing."""
    from routeprof.errors import RouteprofError

    try:
        check(*words, **limits)
    except (AssertionError, RouteprofError) as error:
        return str(error)
    return ""
