"""What ``routeprof diff`` says of two recordings, as far as a page can wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import pandas as pd

from routeprof.compare.comparable import key_text
from routeprof.compare.difference import Difference, compare, unjudged
from routeprof.dashboards.panels.command_line import sentence, written
from routeprof.dashboards.view import Against, Context
from routeprof.errors import RouteprofError, UsageError
from routeprof.profile import Profile
from routeprof.timerange import range_text

UNASKED = (
    "Noise is not known yet: of so much it is found where it is asked for. Choose “Computed” for "
    "“Noise” in the dashboard, or run routeprof diff."
)
TOO_MUCH = (
    "Noise is not known: of so much it takes longer than a page can wait. Choose one phase and "
    "tag, or use the command below."
)
READING = "Noise is not known yet: parts are still to be read."
NOTHING_SHARED = (
    "A and B have no phase and tag in common with tokens of a layer in both: choose others, or "
    "record both alike."
)


@dataclass(frozen=True)
class Work:
    """What finding the noise takes.

    Attributes:
        shares: experts of all layers, phases and tags.
        counts: (step or window, layer, expert) counts to be read, of both.
        parts: files to be read, of both.
    """

    shares: int
    counts: int
    parts: int

    def within(self, most: Work) -> bool:
        """Whether it is no more than that in any respect."""
        pairs = zip(vars(self).values(), vars(most).values(), strict=True)
        return all(own <= limit for own, limit in pairs)


AT_ONCE = Work(shares=1024, counts=500_000, parts=128)
"""What is found unasked, in about 0.2 s."""

MOST = Work(shares=40_000, counts=20_000_000, parts=2048)
"""What a page finds where it is asked for, in about ten seconds."""


def difference(context: Context, other: Against) -> Difference | str:
    """What changed from A, which is open, to B; a sentence where nothing can be compared."""
    asked = context.state.noise
    return context.once(("difference", asked), lambda: _difference(context, other))


def _difference(context: Context, other: Against) -> Difference | str:
    try:
        bare = unjudged(context.profile, other.profile, "")
        if context.exact is None or other.exact is None:
            return _because(bare, READING)
        work = _work(bare, context.whole, other.whole)
        if not work.within(AT_ONCE if context.state.noise == "quick" else MOST):
            return _because(bare, UNASKED if work.within(MOST) else TOO_MUCH)
        return compare(_selected(context, context.exact), _selected(context, other.exact))
    except UsageError:
        return NOTHING_SHARED
    except RouteprofError as error:
        return sentence(error)


def _because(bare: Difference, why: str) -> Difference:
    return replace(bare, groups=tuple(replace(group, reason=why) for group in bare.groups))


def _selected(context: Context, exact: Callable[[], Profile]) -> Profile:
    return exact().narrowed(context.state.phase, context.state.tag)


def _work(bare: Difference, *wholes: Profile) -> Work:
    return Work(len(bare.experts), sum(map(_counts, wholes)), sum(map(_parts, wholes)))


def _counts(whole: Profile) -> int:
    widest = max((layer.experts for layer in whole.info.layers), default=0)
    if whole.has("steps"):
        return int(whole.totals.sums["steps"].sum()) * widest
    return len(whole.totals.windows.window) * widest


def _parts(whole: Profile) -> int:
    if whole.files is None:
        return 0
    return sum(len(whole.files.parts(kind)) for kind in ("part", "steps"))


def verdicts(rows: pd.DataFrame) -> list[str]:
    """Of each row of a table of ``Difference`` what noise says of it."""
    names = {True: "changed", False: "within the noise"}
    return [
        "noise not known" if pd.isna(flag) else names[bool(flag)] for flag in rows["significant"]
    ]


def noise_text(found: Difference) -> str:
    """How noise was found, and of which phases and tags it is not known, and why."""
    texts = []
    if found.judged:
        texts.append(
            "Noise is what changes stay below where stretches of time of A and B are dealt out "
            "anew; its bounds hold for all layers, experts, phases and tags together, level "
            f"{found.alpha:g}."
        )
    reasons = [(key_text(group.key), group.reason) for group in found.groups if group.reason]
    if len({reason for _, reason in reasons}) == 1 and len(reasons) == len(found.groups):
        return " ".join([*texts, full(reasons[0][1])])
    return " ".join([*texts, *(f"{key}: {full(reason)}" for key, reason in reasons)])


def full(text: str) -> str:
    """A sentence of what may have neither a capital nor a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def diff_line(context: Context) -> str:
    """The command that prints the same numbers."""
    state, between = context.state, context.state.between
    options: dict[str, object] = {
        "phase": state.phase,
        "tag": state.tag,
        "between": range_text(between) if between else None,
        "between-b": range_text((0.0, inf)) if between else None,
    }
    return written("routeprof diff A B", options)
