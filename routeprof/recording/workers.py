"""Executors to fold with: processes that are replaced when they die, and a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from threading import Lock
from typing import Any

from routeprof import __version__
from routeprof.errors import WorkersError

TRIES = 4
"""How often a task is tried whose worker dies."""

SECONDS = 10
"""How long to wait for a Dask scheduler."""


class Workers(Executor):
    """Processes on this machine. When one dies, all are replaced and their tasks tried again.

    They are spawned, never forked: a fork of a process with torch's threads may hang.
    """

    def __init__(self, processes: int) -> None:
        self._max_workers = processes
        self._lock = Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` in one of the processes.

        The future raises WorkersError where the process died ``TRIES`` times.
        """
        outer: Future[Any] = Future()
        self._try(outer, partial(fn, *args, **kwargs), 1)
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the processes."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _try(self, outer: Future[Any], call: Callable[[], Any], attempt: int) -> None:
        while True:
            pool = self._running()
            try:
                inner = pool.submit(call)
                break
            except BrokenProcessPool:
                self._discard(pool)
        inner.add_done_callback(partial(self._finished, outer, call, attempt, pool))

    def _running(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._closed:
                raise RuntimeError("submit after shutdown")
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._max_workers, mp_context=get_context("spawn"), initializer=_begin
                )
            return self._pool

    def _discard(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None

    def _finished(
        self,
        outer: Future[Any],
        call: Callable[[], Any],
        attempt: int,
        pool: ProcessPoolExecutor,
        inner: Future[Any],
    ) -> None:
        if inner.cancelled():
            outer.cancel()
            return
        error = inner.exception()
        if not isinstance(error, BrokenProcessPool):
            _settle(outer, inner, error)
            return
        self._discard(pool)
        if attempt == TRIES or self._closed:
            outer.set_exception(
                WorkersError(
                    f"worker processes died {attempt} times at the same parts: is there enough "
                    "memory? give fewer --workers"
                )
            )
            return
        try:
            self._try(outer, call, attempt + 1)
        except (OSError, RuntimeError) as failure:
            outer.set_exception(WorkersError(f"no new worker can be started ({failure})"))


def _settle(outer: Future[Any], inner: Future[Any], error: BaseException | None) -> None:
    if not outer.set_running_or_notify_cancel():
        return
    if error is None:
        outer.set_result(inner.result())
    else:
        outer.set_exception(error)


def _begin() -> None:
    """In a new worker: one thread for reading, and Ctrl-C is the parent's matter."""
    import signal

    import pyarrow as pa

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)


class _Cluster(Executor):
    """A Dask client's executor that knows how much is worth having under way."""

    def __init__(self, inner: Any, threads: int) -> None:
        self._inner, self._max_workers = inner, threads

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` on the cluster."""
        future: Future[Any] = self._inner.submit(fn, *args, **kwargs)
        return future


@contextmanager
def dask_workers(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster as an executor.

    A task whose worker dies runs again on another. Workers need the same routeprof, and the
    recording under the same path.

    Args:
        address: of the scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises:
        WorkersError: the scheduler cannot be reached or is lost, it has no workers, theirs is
            another routeprof, or they keep dying.
    """
    import distributed

    connect: Any = distributed.Client
    try:
        client = connect(address, timeout=SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} ({type(error).__name__}); start one with: "
            "dask scheduler"
        ) from error
    try:
        executor = client.get_executor(retries=TRIES - 1, pure=False)
        yield _Cluster(executor, _threads(client, address))
    except distributed.KilledWorker as error:
        raise WorkersError(
            f"workers of {address} died again and again at the same parts: is there enough "
            "memory? see the logs of the workers"
        ) from error
    except CancelledError as error:
        raise WorkersError(f"the Dask scheduler at {address} is gone; start it again") from error
    finally:
        client.close()


def _threads(client: Any, address: str) -> int:
    """Threads of all workers, once it is known that they can do the work."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise WorkersError(
            f"the Dask scheduler at {address} has no workers; start one with: dask worker {address}"
        )
    try:
        versions = set(client.run(version).values())
    except ImportError as error:
        raise WorkersError(
            f"workers of {address} lack what is needed ({error}); run there: "
            f"pip install 'routeprof[cluster]=={__version__}'"
        ) from error
    if versions != {__version__}:
        raise WorkersError(
            f"workers of {address} have routeprof {', '.join(sorted(versions))}; run there: "
            f"pip install 'routeprof[cluster]=={__version__}'"
        )
    return sum(int(worker["nthreads"]) for worker in workers.values())


def version() -> str:
    """The version of routeprof, asked of each worker."""
    return __version__
