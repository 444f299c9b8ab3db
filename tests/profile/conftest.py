"""The same steps, recorded at two levels."""

from __future__ import annotations

import pytest

from tests.capture.oracle import Step
from tests.profile.by_hand import record, some_steps


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return some_steps()


@pytest.fixture(scope="module")
def windows(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("windows") / "r", steps)


@pytest.fixture(scope="module")
def detailed(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("steps") / "r", steps, level="steps")


@pytest.fixture(params=["windows", "detailed"])
def profile(request):
    return request.getfixturevalue(request.param)
