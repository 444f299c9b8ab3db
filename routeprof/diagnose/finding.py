"""What a finding is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        code: stable name, such as ``silent-layers``.
        evidence: the figures behind it, in one line.
        suggestion: what to do.
        layers: indices of the layers concerned; empty for the whole recording.
        phase: phase that it is about; ``all`` for what is selected.
        figures: the same figures by name, all digits.
        gain: what doing it would bring, as far as the recording can say; empty where it cannot.
    """

    code: str
    severity: Severity
    evidence: str
    suggestion: str
    layers: tuple[int, ...] = ()
    phase: str = "all"
    figures: Mapping[str, float | str] = field(default_factory=dict)
    gain: str = ""


def layer_list(layers: Iterable[int]) -> str:
    """Indices as people write them: ``3–5, 9``."""
    runs: list[list[int]] = []
    for index in sorted(layers):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def layer_count(count: int) -> str:
    """``1 layer``, ``2 layers``."""
    return "1 layer" if count == 1 else f"{count} layers"


def gravest_first(found: Iterable[Finding]) -> list[Finding]:
    """By severity, else in the order found."""
    return sorted(found, key=lambda item: SEVERITIES.index(item.severity))
