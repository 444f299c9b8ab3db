"""Findings: what a reader of the numbers must know first, and what the numbers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from routeprof.ranks import twin_faults
from routeprof.recording.reader import RANKS_PER_RUN

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.recording.reader import RankFiles

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

HOT_IMBALANCE = 3.0
"""A hottest expert at three times the mean: the field's 3 : 1 rule of thumb."""

COLLAPSE_SHARE = 0.8
"""Two experts that take this share of a layer with many more experts."""

STALE_SECONDS = 30.0


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        code: stable name, such as ``silent-layers``.
        layers: indices of the layers concerned; empty for the whole recording.
        evidence: the figures behind it, in one line.
        suggestion: what to do.
    """

    code: str
    severity: Severity
    evidence: str
    suggestion: str
    layers: tuple[int, ...] = ()


def findings(profile: Profile, now: float | None = None) -> list[Finding]:
    """All findings, the gravest first; what was not captured comes before what was."""
    found = [*_completeness(profile, now), *_routing(profile)]
    return sorted(found, key=lambda item: SEVERITIES.index(item.severity))


def layer_list(layers: Iterable[int]) -> str:
    """Indices as people write them: ``3–5, 9``."""
    runs: list[list[int]] = []
    for index in sorted(layers):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


# -- is everything there?


def _completeness(profile: Profile, now: float | None) -> Iterator[Finding]:
    yield from _states(profile)
    yield from _coverage(profile)
    yield from _missing_parts(profile)
    yield from _ranks(profile, now)
    yield from _missing_ranks(profile)
    yield from _twins(profile)
    yield from _remarks(profile)
    yield from _facts(profile)
    yield from _notes(profile)


def _states(profile: Profile) -> Iterator[Finding]:
    silent, unsupported = profile.in_state("silent"), profile.in_state("unsupported")
    if silent:
        yield Finding(
            "silent-layers",
            "error",
            f"{_layers(len(silent))} never ran a hook although the model ran: "
            f"{layer_list(silent)}. Their counts are unknown, not zero",
            "attach before the model is compiled or captured in CUDA graphs, then record again",
            silent,
        )
    if unsupported:
        reasons = {layer.unsupported for layer in profile.info.layers if layer.unsupported}
        yield Finding(
            "unsupported-layers",
            "error",
            f"{_layers(len(unsupported))} cannot be read: {layer_list(unsupported)} "
            f"({'; '.join(sorted(reasons))})",
            "describe the block with record(model, path, layers={'path': LayerSpec(...)})",
            unsupported,
        )
    if not profile.totals.keys and not profile.in_state("captured"):
        yield Finding(
            "nothing-captured",
            "error",
            "no forward pass was recorded",
            "run the model while the recording is on; a paused recording counts nothing",
        )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


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


_PROBLEMS: dict[str, tuple[Severity, str, str]] = {
    "hook_failures": (
        "error",
        "{} calls of our own hooks failed",
        "please report it with the first message in rank.json",
    ),
    "write_failures": (
        "warning",
        "a window could not be written at once, {} times",
        "check the disk; the counts were kept and written later if the run went on",
    ),
    "lost_windows": (
        "error",
        "{} windows of recycled tags were given up: the disk took none for too long",
        "totals lack what was in them; make room on the disk",
    ),
    "missed_passes": (
        "warning",
        "{} forward passes ran beside another one on a second thread and were not counted",
        "run the model from one thread at a time while recording",
    ),
    "aborted_passes": (
        "info",
        "{} forward passes failed in the model and were left out",
        "nothing to do unless you expected them to succeed",
    ),
    "lost_step_rows": (
        "warning",
        "detail of {} steps was overwritten before it could be written; sums are exact",
        "shorten the window",
    ),
    "lost_token_rows": (
        "warning",
        "detail of {} token rows was overwritten before it could be written; sums are exact",
        "shorten the window",
    ),
    "late_windows": (
        "info",
        "{} windows ended late because a step ran on; windows are longer, sums are exact",
        "nothing to do",
    ),
    "unread_masks": (
        "warning",
        "{} passes had an attention mask that is not understood: padding may be counted",
        "compare the token count with what you sent",
    ),
}


def _ranks(profile: Profile, now: float | None) -> Iterator[Finding]:
    ranks = profile.files.ranks if profile.files else ()
    for rank in ranks:
        if rank.state is None:
            yield Finding(
                "damaged-rank",
                "warning",
                f"{rank.name} has no readable rank.json: its state is unknown",
                "its parts are shown",
            )
            continue
        for name, (severity, text, suggestion) in _PROBLEMS.items():
            count = rank.state.problems.get(name)
            if count:
                where = f"{rank.name}: " if len(ranks) > 1 else ""
                code = name.replace("_", "-")
                evidence = where + text.format(f"{count:,}")
                yield Finding(code, severity, evidence, suggestion)
        age = None if now is None else now - rank.state.updated
        if rank.state.state != "stopped" and age is not None and age > STALE_SECONDS:
            yield Finding(
                "not-stopped",
                "warning",
                f"{rank.name} was not stopped and wrote last {age:,.0f} s ago: the process "
                "was killed, or hangs",
                f"at most its last {rank.state.flush_seconds:g} s are missing",
            )


def _missing_ranks(profile: Profile) -> Iterator[Finding]:
    runs: dict[int, list[RankFiles]] = {}
    for rank in profile.files.ranks if profile.files else ():
        runs.setdefault(rank.run, []).append(rank)
    for ranks in runs.values():
        world = max((rank.state.role.world_size for rank in ranks if rank.state), default=1)
        present = {rank.rank for rank in ranks}
        missing = [number for number in range(min(world, RANKS_PER_RUN)) if number not in present]
        if missing:
            who = f"ranks {layer_list(missing)}" if len(missing) > 1 else f"rank {missing[0]}"
            where = f" in {ranks[0].origin}" if ranks[0].origin else ""
            yield Finding(
                "ranks-missing",
                "warning",
                f"{who} of {world} wrote nothing{where}: unless tensor-parallel twins, the "
                "tokens that they own are in no sum",
                "name the directories of all nodes; otherwise hook every process",
            )


def _twins(profile: Profile) -> Iterator[Finding]:
    for fault in twin_faults(profile):
        passes = f"in {fault.steps:,} passes"
        if fault.twin_steps != fault.steps:
            passes = f"in {fault.steps:,} against {fault.twin_steps:,} passes"
        yield Finding(
            "twins-differ",
            "warning",
            f"{fault.twin.name} is a tensor-parallel twin of {fault.owner.name} and counted "
            f"something else in {_layers(len(fault.layers))}: in layer {fault.layers[0]} "
            f"{fault.difference:,} of {fault.assignments:,} assignments {passes}",
            f"sums are of {fault.owner.name}; if each rank routes tokens of its own (sequence "
            "parallelism), let both own theirs, else look for what makes the ranks disagree",
            fault.layers,
        )


def _remarks(profile: Profile) -> Iterator[Finding]:
    for line in profile.files.remarks if profile.files else ():
        yield Finding("recordings-differ", "warning", line, "load them apart to see each whole")


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


# -- what does the routing look like?


def _routing(profile: Profile) -> Iterator[Finding]:
    table = profile.layers()
    table = table[table["assignments"].fillna(0) > 0]
    if not len(table):
        return
    hot = table[table["imbalance_ratio"] > HOT_IMBALANCE]
    if len(hot):
        worst = hot.sort_values("imbalance_ratio").iloc[-1]
        yield Finding(
            "hot-experts",
            "warning",
            f"in layer {worst['layer']} expert {worst['hottest_expert']} gets "
            f"{worst['imbalance_ratio']:.2f} times the mean; above {HOT_IMBALANCE:g} in "
            f"{_layers(len(hot))}",
            "compare tags: skew that differs by tag comes from the data, mix requests; skew that "
            "does not is the model's, replicate hot experts",
            tuple(int(index) for index in hot["layer"]),
        )
    collapsed = table[(table["top2_share"] > COLLAPSE_SHARE) & (table["experts"] > 4)]
    if len(collapsed):
        worst = collapsed.sort_values("top2_share").iloc[-1]
        yield Finding(
            "collapse",
            "error",
            f"two experts take {worst['top2_share']:.1%} of layer {worst['layer']}",
            "check the model: a router that collapses on every prompt needs training",
            tuple(int(index) for index in collapsed["layer"]),
        )
    dead = table[table["dead_experts"] > 0]
    if len(dead):
        worst = dead.sort_values("dead_experts").iloc[-1]
        yield Finding(
            "dead-experts",
            "info",
            f"{int(worst['dead_experts'])} of {worst['experts']} experts of layer "
            f"{worst['layer']} got no token; some in {_layers(len(dead))}",
            "record more traffic before you conclude: small samples show false dead experts",
            tuple(int(index) for index in dead["layer"]),
        )
    yield from _small_gemms(profile)


def _small_gemms(profile: Profile) -> Iterator[Finding]:
    if "decode" not in profile.phases:
        return
    table = profile.select(phase="decode").gemm()
    share = table["small_gemm_share"].mean()
    if np.isfinite(share) and share > 0.5:
        yield Finding(
            "small-gemms",
            "info",
            f"in decode {share:.0%} of the expert GEMMs have fewer than 16 tokens",
            "they are bound by reading weights: a larger batch costs little time",
        )
