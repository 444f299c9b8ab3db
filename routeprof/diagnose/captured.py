"""Rules: is everything in the recording?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routeprof.diagnose.finding import Finding, layer_count, layer_list

if TYPE_CHECKING:
    from routeprof.profile import Profile


def layers_and_parts(profile: Profile) -> Iterator[Finding]:
    """Layers without counts, counts that do not add up, parts that are missing."""
    yield from _states(profile)
    yield from _coverage(profile)
    yield from _missing_parts(profile)
    yield from _dropped_detail(profile)


def _states(profile: Profile) -> Iterator[Finding]:
    silent, unsupported = profile.in_state("silent"), profile.in_state("unsupported")
    if silent:
        yield Finding(
            "silent-layers",
            "error",
            f"{layer_count(len(silent))} never ran a hook although the model ran: "
            f"{layer_list(silent)}. Their counts are unknown, not zero",
            "attach before the model is compiled or captured in CUDA graphs, then record again",
            silent,
        )
    if unsupported:
        reasons = {layer.unsupported for layer in profile.info.layers if layer.unsupported}
        yield Finding(
            "unsupported-layers",
            "error",
            f"{layer_count(len(unsupported))} cannot be read: {layer_list(unsupported)} "
            f"({'; '.join(sorted(reasons))})",
            "describe the block with record(model, path, layers={'path': LayerSpec(...)})",
            unsupported,
        )
    if not profile.totals.keys:
        if profile.is_whole:
            text = "no forward pass was recorded"
            todo = "run the model while the recording is on; a paused recording counts nothing"
        else:
            text, todo = "no forward pass is in what is selected", "select more, or another time"
        yield Finding("nothing-captured", "error", text, todo)


def _coverage(profile: Profile) -> Iterator[Finding]:
    table = profile.layers()
    # A silent layer has a finding of its own.
    known = table[table["layer"].isin(profile.in_state("captured"))]
    low = known[(known["coverage"] < 1) | (known["coverage"] > 1)]
    if len(low):
        least = low.sort_values("coverage").iloc[0]
        yield Finding(
            "coverage",
            "error",
            f"captured assignments are {least['coverage']:.4f} of those that the engine made "
            f"in layer {least['layer']}",
            "see what else is reported here; numbers of these layers are of a part only",
            tuple(int(index) for index in low["layer"]),
        )
    invalid = table[(table["invalid"] > 0)]
    dropping = {layer.index for layer in profile.info.layers if layer.drops}
    stray = invalid[~invalid["layer"].isin(dropping)]
    if len(stray):
        yield Finding(
            "invalid-ids",
            "warning",
            f"{int(stray['invalid'].sum()):,} assignments named no expert of their layer",
            "padding rows of the engine are usual; otherwise check the router",
            tuple(int(index) for index in stray["layer"]),
        )


def _missing_parts(profile: Profile) -> Iterator[Finding]:
    for line in profile.totals.unread:
        yield Finding(
            "damaged-part", "error", line, "the other parts are shown; restore it from a copy"
        )
    for rank in profile.files.ranks if profile.files else ():
        missing = rank.missing()
        if missing:
            some = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
            yield Finding(
                "missing-parts",
                "error",
                f"{rank.name}: {len(missing)} part files are missing: {some}",
                "totals lack what was in them; copy the whole directory",
            )


def _dropped_detail(profile: Profile) -> Iterator[Finding]:
    ranks = profile.files.ranks if profile.files else ()
    dropped = [rank.dropped for rank in ranks if rank.dropped]
    if dropped:
        latest = max(dropped, key=lambda one: one.before)
        where = f" in {len(dropped)} of {len(ranks)} ranks" if len(ranks) > 1 else ""
        parts = sum(one.count for one in dropped)
        yield Finding(
            "detail-dropped",
            "warning",
            f"{latest.text}{where}: {parts:,} part files",
            "totals are whole; what is said of steps, tokens and requests is of the rest",
        )
