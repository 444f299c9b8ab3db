"""Rules: what each rank says went wrong, and ranks that wrote nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routeprof.diagnose.finding import Finding, Severity, layer_count, layer_list
from routeprof.ranks import twin_faults
from routeprof.recording.reader import RANKS_PER_RUN

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.recording.reader import RankFiles

STALE_SECONDS = 30.0


def rank_findings(profile: Profile, now: float | None) -> Iterator[Finding]:
    """Problems, ranks that are missing, twins that disagree.

    Args:
        now: seconds since the epoch, to tell a live rank from one that was killed.
    """
    yield from _problems(profile, now)
    yield from _missing_ranks(profile)
    yield from _twins(profile)


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


def _problems(profile: Profile, now: float | None) -> Iterator[Finding]:
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
                f"at most its last {rank.state.flush_seconds:g} s are missing, unless its disk "
                "took no more before",
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
            f"something else in {layer_count(len(fault.layers))}: in layer {fault.layers[0]} "
            f"{fault.difference:,} of {fault.assignments:,} assignments {passes}",
            f"sums are of {fault.owner.name}; if each rank routes tokens of its own (sequence "
            "parallelism), let both own theirs, else look for what makes the ranks disagree",
            fault.layers,
        )
