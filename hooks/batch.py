"""What a forward pass of a transformers model is about to see: rows, padding, phase."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from routeprof.hooks.taps import forward_parameters

CACHE_NAMES = ("past_key_values", "cache", "past_key_value", "cache_params")


@dataclass(frozen=True)
class Batch:
    """One call of a pass.

    Attributes:
        batch, length: the call has batch · length rows, batch-major.
        phase: one of ``topology.PHASES``.
        valid: int64 [batch * length], 0 for padding; None where nothing is masked.
        fresh: the rows begin new sequences.
        rewound: tokens that were taken off the cache since the last call: refused drafts.
        mask_unread: there was a mask of a kind that is not understood; all rows count.
    """

    batch: int
    length: int
    phase: str
    valid: Tensor | None
    fresh: bool
    rewound: int = 0
    mask_unread: bool = False


class BatchReader:
    """Reads the arguments of one module's forward pass.

    It never looks at a value on the device: the phase follows from shapes, and from the length
    of the cache where the host knows it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = {name: place for place, name in enumerate(forward_parameters(module))}
        self._cached = any(name in self._places for name in CACHE_NAMES)
        self._last_cache: weakref.ref[Any] | None = None
        self._end = 0

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | None:
        """The batch, or None where the call has no tokens."""
        tokens = self._argument("input_ids", args, kwargs)
        if not isinstance(tokens, Tensor):
            tokens = self._argument("inputs_embeds", args, kwargs)
        if not isinstance(tokens, Tensor):
            tokens = next((value for value in args if isinstance(value, Tensor)), None)
        if tokens is None or tokens.ndim < 1:
            return None
        batch, length = _batch_and_length(tokens)
        mask = self._argument("attention_mask", args, kwargs)
        valid, unread = row_mask(mask, batch, length, tokens.device)
        phase, rewound = self._phase(length, self._cache(args, kwargs))
        return Batch(batch, length, phase, valid, phase == "prefill", rewound, unread)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        place = self._places.get(name)
        return args[place] if place is not None and place < len(args) else None

    def _cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for name in CACHE_NAMES:
            cache = self._argument(name, args, kwargs)
            if cache is not None:
                return cache
        return None

    def _phase(self, length: int, cache: Any) -> tuple[str, int]:
        """Prefill, decode, or unknown, and how far the cache was cut back.

        Unknown are several tokens onto a cache that holds some already: a chunk of a prefill, a
        further turn, or a speculative verification.
        """
        if torch.compiler.is_compiling():
            return ("decode" if length == 1 and self._cached else "prefill"), 0
        known = self._last_cache is not None and self._last_cache() is cache
        past = self._past(cache, known)
        rewound = max(0, self._end - past) if known and past is not None else 0
        self._end = (past or 0) + length
        # A static cache keeps its length on the device; whether it was seen before must do.
        if not (known if past is None else past):
            return "prefill", 0
        return ("decode" if length == 1 else "unknown"), rewound

    def _past(self, cache: Any, known: bool) -> int | None:
        """Tokens that the cache holds already; None where the host cannot tell."""
        if cache is None:
            self._last_cache = None
            return 0
        if not known:
            self._last_cache = _reference(cache)
        try:
            length = cache.get_seq_length()
        except (TypeError, AttributeError, ValueError):
            return None
        return length if isinstance(length, int) else None


def _reference(cache: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(cache)
    except TypeError:
        return None


def _batch_and_length(tokens: Tensor) -> tuple[int, int]:
    """Of token ids [batch, length] or hidden states [batch, length, hidden], of one row or more."""
    axes = tokens.shape[: tokens.ndim - tokens.dtype.is_floating_point]
    if len(axes) > 1:
        return axes[0], axes[1]
    return 1, axes[0] if axes else 1


def row_mask(
    mask: Any, batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Which rows are real, int64 [batch * length], and whether the mask was not understood.

    Args:
        mask: [batch, past + length]; [batch, heads, length, keys] of bool (True is open) or of
            floats to be added (0 is open); a dict of such, by attention kind; or None.
    """
    if isinstance(mask, Mapping):
        masks = [mask.get("full_attention"), *mask.values()]
        mask = next((value for value in masks if value is not None), None)
    if mask is None:
        return None, False
    if not isinstance(mask, Tensor):
        return None, True
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
        real = mask[:, -length:] != 0
    elif mask.ndim == 4 and mask.shape[2] == length and mask.shape[0] in (1, batch):
        if mask.dtype.is_floating_point:
            mask = mask > torch.finfo(mask.dtype).min / 2
        # A padding row attends to nothing at all.
        real = (mask != 0)[:, 0].any(-1).expand(batch, length)
    else:
        return None, True
    return real.reshape(-1).to(device=device, dtype=torch.int64), False
