"""Where each number sits in the device buffers: column ranges shared by capture and drain."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from routeprof.topology import PHASES, Layer

BINS_PER_OCTAVE = 32
"""Resolution of the step-imbalance histogram: bin = floor(32 · log2(max / mean))."""

GEMM_BUCKETS = 33
"""Bucket 0: experts without tokens in a step; bucket b: 2**(b-1) <= tokens < 2**b."""

FACTOR_GRID = 10_000
"""Capacity factors are read as fractions with denominators up to this: 1.1 is 11/10, so that
capacities are exact."""

DEFAULT_CAPACITY_FACTORS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)

GATE_SCALARS = ("entropy", "top1", "margin", "z", "rows")
"""Sums over tokens, kept behind the per-expert gate columns."""


@dataclass(frozen=True)
class Layout:
    """Shapes and columns for one group of L layers that run in the same forward pass.

    A *step row* [experts + 4] is what one layer counts in one step: assignments below the valid
    range, per expert, above the range, then tokens and calls. Invalid ids therefore need no
    branch: they land in the columns beside the experts.
    """

    layers: tuple[Layer, ...]
    capacity_factors: tuple[float, ...] = DEFAULT_CAPACITY_FACTORS
    tags: int = 8

    def __post_init__(self) -> None:
        """Work every column out now: torch.compile cannot trace the lock of cached_property."""
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    @cached_property
    def experts(self) -> int:
        return max(layer.experts for layer in self.layers)

    @cached_property
    def top_k(self) -> int:
        return max(layer.choices for layer in self.layers)

    @cached_property
    def slots(self) -> int:
        """Accumulators: one for each tag and phase."""
        return self.tags * len(PHASES)

    @cached_property
    def step_width(self) -> int:
        return self.experts + 4

    @cached_property
    def tokens_column(self) -> int:
        return self.experts + 2

    @cached_property
    def calls_column(self) -> int:
        return self.experts + 3

    @cached_property
    def imbalance_bins(self) -> int:
        return BINS_PER_OCTAVE * max(1, (self.experts - 1).bit_length()) + 1

    @cached_property
    def factors(self) -> tuple[Fraction, ...]:
        return tuple(
            Fraction(factor).limit_denominator(FACTOR_GRID) for factor in self.capacity_factors
        )

    @cached_property
    def sections(self) -> dict[str, slice]:
        """Columns of the integer accumulator: the step row first, then step statistics."""
        factors = len(self.capacity_factors)
        widths = {
            "row": self.step_width,
            "max_load": 1,
            "imbalance": self.imbalance_bins,
            "gemm": GEMM_BUCKETS,
            "overflow": factors,
            "overflow_steps": factors,
            "capacity": factors,
        }
        return _consecutive(widths)

    @cached_property
    def int_width(self) -> int:
        return _end(self.sections)

    @cached_property
    def gate_sections(self) -> dict[str, slice]:
        """Columns of the floating-point accumulator."""
        widths = {"mass": self.experts, "weight": self.experts, "scalars": len(GATE_SCALARS)}
        return _consecutive(widths)

    @cached_property
    def gate_width(self) -> int:
        return _end(self.gate_sections)


def _consecutive(widths: dict[str, int]) -> dict[str, slice]:
    sections, start = {}, 0
    for name, width in widths.items():
        sections[name] = slice(start, start + width)
        start += width
    return sections


def _end(sections: dict[str, slice]) -> int:
    return max(int(section.stop) for section in sections.values())


def slot_key(slot: int) -> tuple[int, str]:
    """Tag number and phase of an accumulator slot."""
    tag, phase = divmod(slot, len(PHASES))
    return tag, PHASES[phase]
