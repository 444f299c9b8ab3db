"""What a forward pass of transformers allocates, followed on the meta device.

Tensors there have shapes and storages but no memory, so a model of any size can be followed, at
any number of tokens. What is inside of a kernel is not seen.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routeprof.plan.meta import built_on_meta, quietly

NAN = float("nan")
MOST_OPERATIONS = 200_000


class _TooLongError(Exception):
    """More operations than are followed: a loop over tokens."""


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations make, when they come and when they go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._sizes: list[int] = []
        self._events: list[int] = []
        self._operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise _TooLongError
        given = {id(storage) for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if id(storage) not in given and id(storage) not in self._alive:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, number = id(storage), len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._events.append(number)
        self._alive[key] = number, weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        self._events.append(~self._alive.pop(key)[0])

    def peak(self) -> int:
        """Most bytes alive at one time, without those that are alive now."""
        left = {number for number, _ in self._alive.values()}
        now = most = 0
        for event in self._events:
            number = event if event >= 0 else ~event
            if number not in left:
                now += self._sizes[number] if event >= 0 else -self._sizes[number]
                most = max(most, now)
        return most


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()


def peak_bytes(model: nn.Module, ids: Tensor) -> int:
    """Most bytes that a pass up to the last hidden states holds at one time.

    Weights and inputs are not counted, nor what the pass leaves in the cache.

    Args:
        model: of transformers, on the device of ``ids``.
        ids: tokens, ``[batch, tokens]``.
    """
    inner: Any = getattr(model, "base_model", model)
    with torch.inference_mode(), _Storages() as followed:
        cache = inner(input_ids=ids, use_cache=True).past_key_values
    gc.collect()
    peak: int = followed.peak()
    del cache
    return peak


@lru_cache(maxsize=256)
def allocated_bytes(config: str, tokens: int, item: float) -> float:
    """Most bytes that a pass over one sequence holds; NaN where it cannot be followed.

    Experts are computed as grouped products, where the family can.

    Args:
        config: a config.json's text, with its ``model_type``.
        tokens: of the sequence.
        item: bytes of an activation, 2 or 4.
    """
    dtype = torch.float32 if item == torch.float32.itemsize else torch.bfloat16
    try:
        model = built_on_meta(json.loads(config), "config.json", dtype)
        with quietly():
            return peak_bytes(model, torch.zeros((1, tokens), dtype=torch.long, device="meta"))
    except Exception:  # whatever the model does that tensors without values cannot
        return NAN
