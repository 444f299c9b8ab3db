"""Rules: what a reader of the numbers must keep in mind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routeprof.diagnose.finding import Finding

if TYPE_CHECKING:
    from routeprof.profile import Profile


def remark_findings(profile: Profile) -> Iterator[Finding]:
    """Recordings that differ, what a file could not say, facts of the engine, notes on layers."""
    yield from _differences(profile)
    yield from _converted(profile)
    yield from _facts(profile)
    yield from _notes(profile)


def _differences(profile: Profile) -> Iterator[Finding]:
    for line in profile.files.remarks if profile.files else ():
        yield Finding("recordings-differ", "warning", line, "load them apart to see each whole")


def _converted(profile: Profile) -> Iterator[Finding]:
    """What a file of another tool could not say."""
    for note in profile.info.notes:
        yield Finding("converted", "info", f"{profile.info.source}: {note}", "keep it in mind")
    if any(layer.top_k is None for layer in profile.info.layers):
        yield Finding(
            "top-k-unknown",
            "info",
            "how many experts a token has is not known, so tokens and overflow are not, either",
            "routeprof convert FILE DIR --top-k K",
        )


_FACTS: dict[str, tuple[str, str]] = {
    "prefix_cached_tokens": (
        "{} prompt tokens came from the prefix cache: they were not computed, so not routed",
        "nothing is missing; tokens counts what was computed",
    ),
    "preemptions": (
        "requests were preempted {} times and computed their tokens again",
        "each computation is counted; a larger KV cache avoids them",
    ),
}


def _facts(profile: Profile) -> Iterator[Finding]:
    ranks = profile.files.ranks if profile.files and profile.is_whole else ()
    for name, (text, suggestion) in _FACTS.items():
        # All workers of an engine see the same requests: the first of each speaks for it.
        first = [
            rank.state
            for rank in ranks
            if rank.state is not None and not (rank.state.role.tp or rank.state.role.pp)
        ]
        count = sum(state.facts.get(name, 0) for state in first)
        if count:
            yield Finding(name.replace("_", "-"), "info", text.format(f"{count:,}"), suggestion)


def _notes(profile: Profile) -> Iterator[Finding]:
    by_note: dict[str, list[int]] = {}
    for layer in profile.info.layers:
        if layer.note:
            by_note.setdefault(layer.note, []).append(layer.index)
    for note, layers in by_note.items():
        yield Finding("layer-note", "info", note, "keep it in mind", tuple(layers))
