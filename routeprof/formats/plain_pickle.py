"""Pickles of plain data, read without running anything in them.

Only names that are allowed mean something, and what a hostile pickle could blow up is refused: a
memo of 2^31 places, keys that take for ever to hash, more lists than memory holds.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

MOST_CONTAINERS = 1 << 19


def loads(
    data: bytes,
    storage: Callable[[Any], Any],
    names: Collection[str],
    allowed: Mapping[tuple[str, str], Any],
) -> Any:
    """What a pickle of ``torch.save`` holds.

    Args:
        storage: what stands for a persistent id.
        names: types of storages, which stand for themselves.
        allowed: functions by module and name.

    Raises:
        pickle.UnpicklingError: it holds something else; damage raises much else.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.storage, unpickler.names, unpickler.allowed = storage, names, allowed
    return unpickler.load()


class _Unpickler(pickle._Unpickler):
    """The one written in Python: C's takes memory for whatever index a pickle may name.

    Keys are text or numbers: to hash tuples of tuples takes for ever, and so does to print them.
    """

    storage: Callable[[Any], Any]
    names: Collection[str]
    allowed: Mapping[tuple[str, str], Any]
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    containers = 0

    def persistent_load(self, pid: Any) -> Any:
        return self.storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in self.names:
            return name
        known = self.allowed.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return known

    def load_container(self) -> None:
        self.containers += 1
        if self.containers > MOST_CONTAINERS:
            raise pickle.UnpicklingError(f"it has more than {MOST_CONTAINERS:,} lists and tables")

    def load_list(self) -> None:
        self.load_container()
        self.append([])

    def load_table(self) -> None:
        self.load_container()
        self.append({})

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise pickle.UnpicklingError("it sets items of no table")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float):
                raise pickle.UnpicklingError(f"it has a {type(key).__name__} for a key")
            target[key] = value

    def load_attributes(self) -> None:
        """What ``state_dict`` notes of itself beside its items: left out."""
        self.stack.pop()
        if not isinstance(self.stack[-1], OrderedDict):
            raise pickle.UnpicklingError("it sets attributes")

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("it holds what torch.save does not write")

    dispatch[pickle.EMPTY_LIST[0]] = load_list
    dispatch[pickle.EMPTY_DICT[0]] = load_table
    dispatch[pickle.SETITEM[0]] = load_item
    dispatch[pickle.SETITEMS[0]] = load_items
    dispatch[pickle.BUILD[0]] = load_attributes
    for _code in (
        *(pickle.LIST, pickle.DICT, pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
        *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.DUP),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4),
    ):
        dispatch[_code[0]] = load_refused
