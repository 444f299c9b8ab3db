"""From where on a figure is a finding: one table, which a TOML file may change."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError

TABLE = "thresholds"
LARGEST = 1e12


def _limit(value: float, least: float = 0.0, most: float = inf) -> float:
    default: float = field(default=value, metadata={"least": least, "most": most})
    return default


def _check(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"threshold {name} is {value!r}: pass a number")
    if abs(value) > LARGEST:
        raise UsageError(f"threshold {name} is too large: pass at most {LARGEST:g}")
    if not least <= value <= most:
        bound = f"from {least:g} to {most:g}" if most < inf else f"of {least:g} or more"
        raise UsageError(f"threshold {name} is {value:g}: pass a number {bound}")


@dataclass(frozen=True)
class Thresholds:
    """Limits of all findings; ``docs/diagnose.md`` says what each is for.

    Attributes:
        hot_imbalance: load of the hottest expert ÷ mean load, of a layer or of a tag.
        hot_cold: load of the hottest expert ÷ that of the coldest with any.
        collapse_share: share of the two hottest experts of a layer with more than four.
        narrow_ratio: imbalance of the worst tag ÷ that of all tags mixed evenly.
        step_ratio: p95 of the steps' imbalance ÷ what chance gives steps of that size.
        small_gemm_share: share of expert GEMMs with fewer than 16 tokens, in decode.
        max_overflow: share of assignments above capacity.
        capacity_factor: of the engine; 0 where it has no capacity.
        rank_imbalance: load of the fullest rank ÷ mean rank, mean over layers.
        cross_node_share: share of the sends from rank to rank that leave the node.
        drift: Jensen–Shannon divergence in bits that counts, if it is above noise too.
        margin: mean p(k) − p(k+1) as a multiple of 1 ÷ experts.
        dense_ratio: modelled time of the MoE layers ÷ of dense ones with as many active weights.
        min_load: mean assignments of an expert below which shares are not judged.
    """

    hot_imbalance: float = _limit(3.0, 1)
    hot_cold: float = _limit(3.0, 1)
    collapse_share: float = _limit(0.8, 0, 1)
    narrow_ratio: float = _limit(1.25, 1)
    step_ratio: float = _limit(1.5, 1)
    small_gemm_share: float = _limit(0.5, 0, 1)
    max_overflow: float = _limit(0.01, 0, 1)
    capacity_factor: float = _limit(0.0)
    rank_imbalance: float = _limit(1.2, 1)
    cross_node_share: float = _limit(0.5, 0, 1)
    drift: float = _limit(0.05, 0, 1)
    margin: float = _limit(0.05)
    dense_ratio: float = _limit(1.5)
    min_load: float = _limit(16.0)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), **item.metadata)

    def changed(self, **limits: float | None) -> Thresholds:
        """The same with other limits; None keeps one.

        Raises:
            UsageError: a limit that cannot be.
        """
        return replace(self, **{name: value for name, value in limits.items() if value is not None})


DEFAULTS = Thresholds()


def read_thresholds(path: Path) -> Thresholds:
    """The table ``[thresholds]`` of a TOML file; what it does not name stays as it is.

    Raises:
        UsageError: no such file, no TOML, an unknown table or name, or a limit that cannot be.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a TOML file") from None
    except ValueError as error:  # not UTF-8, or not TOML
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is no TOML ({reason}); see docs/diagnose.md") from None
    return _from_tables(data, path)


def _from_tables(data: dict[str, Any], path: Path) -> Thresholds:
    table = data.get(TABLE, {})
    unknown = [name for name in data if name != TABLE]
    if unknown or not isinstance(table, dict):
        raise UsageError(f"{path}: {(unknown or [TABLE])[0]!r} is no table of it; use [{TABLE}]")
    names = [item.name for item in fields(Thresholds)]
    for name in table:
        if name not in names:
            raise UsageError(f"{path}: no threshold {name!r}; there are {', '.join(names)}")
    try:
        return Thresholds(**table)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
