"""Executors to fold with: workers that are really killed, and a real Dask cluster."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from routeprof.errors import WorkersError
from routeprof.recording import workers
from routeprof.recording.fold import fold
from routeprof.recording.reader import open_recording
from routeprof.recording.workers import TRIES, Workers, dask_workers
from tests.recording.dask_cluster import cluster
from tests.recording.made import info_of, random_parts, write
from tests.recording.test_fold import equal

INFO = info_of()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Enough parts for many tasks."""
    directory = tmp_path_factory.mktemp("workers") / "r"
    write(directory, random_parts(seed=5, parts=60))
    return open_recording(directory).parts("part")


def killed_once(marker: Path, number: int) -> int:
    """Kills its process the first time."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return number
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_by_the_way(pool: Workers):
    """Kills a process of the pool once the first parts are done."""
    first = []

    def told(done: int, total: int) -> None:
        if not first and done < total:
            assert pool._pool is not None
            first.extend(pool._pool._processes)
            os.kill(first[0], signal.SIGKILL)

    return told, first


def test_a_process_that_is_killed_is_replaced(parts):
    with Workers(2) as pool:
        told, pids = killed_by_the_way(pool)
        found = fold(parts, INFO, executor=pool, progress=told)
        assert pids
    equal(found, fold(parts, INFO))


def test_a_task_that_was_killed_is_done_again(tmp_path: Path):
    with Workers(1) as pool:
        futures = [pool.submit(killed_once, tmp_path / "marker", number) for number in range(4)]
        assert [future.result() for future in futures] == [0, 1, 2, 3]


def test_a_task_that_kills_every_process_is_an_error():
    with Workers(1) as pool:
        future = pool.submit(killed, 0)
        with pytest.raises(WorkersError, match=f"died {TRIES} times"):
            future.result()
        assert pool.submit(abs, -1).result() == 1


def test_what_a_task_raises_is_raised():
    with Workers(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()


def test_a_real_cluster_folds_the_same(parts, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(parts[0].path.parents[1])  # and not the workers' directory
    relative = [replace(part, path=part.path.relative_to(Path.cwd())) for part in parts[::-1]]
    with cluster(tmp_path / "dask", 2) as (address, _), dask_workers(address) as executor:
        equal(fold(relative, INFO, executor=executor), fold(parts, INFO))


def test_a_cluster_folds_the_same_when_a_worker_is_killed_half_way(parts, tmp_path: Path):
    steps = []
    with cluster(tmp_path / "dask", 2) as (address, processes), dask_workers(address) as executor:

        def told(done: int, total: int) -> None:
            if not steps and done < total:
                processes[0].kill()
                processes[0].wait()
            steps.append(done)

        found = fold(parts, INFO, executor=executor, progress=told)
        assert processes[0].returncode == -signal.SIGKILL
        assert processes[1].poll() is None
    assert len(steps) > 2
    equal(found, fold(parts, INFO))


def test_a_cluster_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 1)
    with (
        pytest.raises(WorkersError, match="no Dask scheduler answers"),
        dask_workers("tcp://127.0.0.1:9"),
    ):
        pass
    with (
        pytest.raises(WorkersError, match="no Dask scheduler answers"),
        dask_workers("nonsense:x:y"),
    ):
        pass
    with (
        cluster(tmp_path / "dask", 0) as (address, _),
        pytest.raises(WorkersError, match="has no workers"),
        dask_workers(address),
    ):
        pass


def test_workers_of_another_version_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(workers, "__version__", "99.0")
    with (
        cluster(tmp_path / "dask", 1) as (address, _),
        pytest.raises(WorkersError, match=r"routeprof\[cluster\]==99\.0"),
        dask_workers(address),
    ):
        pass


def test_a_scheduler_that_goes_is_one_line(parts, tmp_path: Path):
    def told(done: int, total: int) -> None:
        processes[-1].kill()
        processes[-1].wait()

    with (
        cluster(tmp_path / "dask", 1) as (address, processes),
        pytest.raises(WorkersError, match="is gone"),
        dask_workers(address) as executor,
    ):
        fold(parts * 5, INFO, executor=executor, progress=told)
