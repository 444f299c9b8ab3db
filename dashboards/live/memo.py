"""Memo: what was computed for one page, for the other pages that show the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """The newest results by key; who asks for one that is being computed waits for it."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._results: OrderedDict[Hashable, Future[Value]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result of that key; ``make`` is called unless it is known.

        Raises:
            Exception: what ``make`` raised, for all who waited; the next one tries again.
        """
        with self._lock:
            known = self._results.get(key)
            result = known or Future()
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self._kept:
                self._results.popitem(last=False)
        if known is None:
            self._fill(key, result, make)
        return result.result()

    def _fill(self, key: Hashable, result: Future[Value], make: Callable[[], Value]) -> None:
        try:
            result.set_result(make())
        except BaseException as error:
            with self._lock:
                self._results.pop(key, None)
            result.set_exception(error)
