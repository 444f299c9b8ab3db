"""Files of routing that cannot become a recording, and why."""

from __future__ import annotations

from pathlib import Path

SHARES = (
    "holds shares by expert, not counts: totals, ranks and noise cannot be had from them; pass "
    "the counts that they were made of"
)
_SHARES = (b'"count_frequency"', b'"prob_density"', b'"token_scores"', b'"gate_scores"')


def why_refused(path: Path) -> str | None:
    """What a file is, where it is known and of no use; else None."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(4096)
    return SHARES if any(name in head for name in _SHARES) else None
