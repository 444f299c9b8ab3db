"""What each layer of a model holds of a sequence, and the room that it leaves for others.

Bytes are those of the memory plan (`plan.cache`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from routeprof.plan.cache import Kept, cache_bytes, kept
from routeprof.plan.precision import Precision
from routeprof.report.summary import size

if TYPE_CHECKING:
    from routeprof.plan.shape import Shape

LENGTH = 8192
"""Tokens of the sequence that room is told for, as ``routeprof plan`` takes by default."""


@dataclass(frozen=True)
class Roles:
    """Layers by what they do, by their number in the model.

    Attributes:
        count: all layers.
        routes: have routed experts.
        kv: hold keys and values.
        state: hold a fixed state.
    """

    count: int
    routes: frozenset[int]
    kv: frozenset[int]
    state: frozenset[int]

    @property
    def both(self) -> frozenset[int]:
        """Route and hold a state."""
        return self.routes & self.state


def roles(shape: Shape) -> Roles:
    """What each layer does."""
    kinds = [(one.layer, one.kind == "kv") for one in kept(shape)]
    return Roles(
        len(shape.layers),
        frozenset(at for at, _ in shape.moes),
        frozenset(at for at, grows in kinds if grows),
        frozenset(at for at, grows in kinds if not grows),
    )


@dataclass(frozen=True)
class Room:
    """Room for sequences, beside a model in which every layer that mixes tokens attends.

    In that one each layer with a fixed state has keys and values instead, as many as the layers
    that have them hold on average.
    """

    found: Roles
    holds: Collection[Kept]
    types: Precision

    def attending(self, length: int) -> float:
        """Bytes of a sequence in the model that attends everywhere."""
        mixing = len(self.found.kv | self.found.state)
        return cache_bytes(self.holds, length, self.types).kv * mixing / len(self.found.kv)

    @property
    def ratio(self) -> float:
        """How many times the sequences of `LENGTH` tokens."""
        return self.attending(LENGTH) / cache_bytes(self.holds, LENGTH, self.types).total

    @property
    def even(self) -> float | None:
        """Tokens from which on a sequence takes less; None where that depends on a window."""
        more = self.attending(1) - cache_bytes(self.holds, 1, self.types).kv
        if more <= 0 or any(one.window for one in self.holds):
            return None
        return cache_bytes(self.holds, 1, self.types).state / more

    @property
    def figures(self) -> dict[str, float]:
        """Empty where no layer attends: there is nothing to compare with."""
        if not self.found.kv:
            return {}
        figures = {
            "length": LENGTH,
            "bytes_of_sequence": cache_bytes(self.holds, LENGTH, self.types).total,
            "bytes_if_all_attended": self.attending(LENGTH),
            "times_the_sequences": self.ratio,
        }
        return figures if self.even is None else figures | {"takes_less_from_tokens": self.even}

    @property
    def text(self) -> str:
        """The same in words."""
        whole = cache_bytes(self.holds, LENGTH, self.types).total
        if not self.found.kv:
            return f"a sequence takes {size(whole)} at every length"
        mixing = len(self.found.kv | self.found.state)
        even = 0 if self.even is None else ceil(self.even)
        short = f"; sequences below {even:,} tokens take more" if even > 1 else ""
        return (
            f"a sequence of {LENGTH:,} tokens takes {size(whole)} instead of "
            f"{size(self.attending(LENGTH))} with keys and values in all {mixing} layers that mix "
            f"tokens: room for {self.ratio:.1f} times the sequences{short}"
        )
