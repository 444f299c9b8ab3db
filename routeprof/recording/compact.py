"""Compaction of a recording: many small windows become few coarse ones, and old detail goes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from shutil import rmtree

from routeprof.errors import RecordingError, UsageError
from routeprof.recording.ages import bytes_of, detail_ages, window_ages
from routeprof.recording.dropped import Dropped
from routeprof.recording.groups import FOLDER
from routeprof.recording.places import is_remote
from routeprof.recording.reader import RankFiles, RecordingFiles, open_recording
from routeprof.recording.retention import LADDER, Detail, Policy, Timed, groups, older, oldest
from routeprof.recording.rewriting import delete_detail, leftovers, put_together

LOCK_FILE = "compact.lock"


@dataclass(frozen=True)
class Size:
    """Part files of a recording, and bytes of all its files."""

    parts: int
    bytes: int


@dataclass(frozen=True)
class Outcome:
    """What was done.

    Attributes:
        after: an estimate where nothing was done.
        dropped: parts of detail that were deleted.
        remarks: one line for each part that was left as it is although it is old, and why.
    """

    before: Size
    after: Size
    dropped: int = 0
    remarks: tuple[str, ...] = ()


def compact(
    directory: Path, policy: Policy, *, most: int | None = None, dry_run: bool = False
) -> Outcome:
    """Make windows coarser by age, and delete detail that is too old; sums stay as they are.

    Ages count from the end of the newest window. Of a rank that was not stopped the last part of
    each kind is left alone, so that it may go on recording.

    Args:
        most: bytes that the recording is to have at most: the oldest detail goes first, then all
            windows become coarser and coarser. It may end up larger than that.
        dry_run: touch nothing.

    Raises:
        UsageError: the recording is not in a local directory.
        NotARecordingError: there is no recording.
        RecordingError: another compaction is at work, or something cannot be written.
    """
    if is_remote(directory):
        raise UsageError(f"{directory} is no local directory; compact a copy, then copy that up")
    files = open_recording(directory)
    if dry_run:
        return _compacted(_Job(files, dry_run=True), policy, most)
    try:
        with _alone(directory):
            outcome = _compacted(_Job(open_recording(directory)), policy, most)
            if outcome.after != outcome.before:  # what is kept of parts that are gone
                rmtree(directory / FOLDER, ignore_errors=True)
            return outcome
    except OSError as error:
        raise RecordingError(
            f"cannot write to {directory} ({error.strerror or error}): nothing is lost, compact it "
            "again when it can be written to"
        ) from error


def _compacted(job: _Job, policy: Policy, most: int | None) -> Outcome:
    before = job.size
    job.clear()
    job.coarsen(policy)
    if policy.keep < inf:
        job.drop(older(job.detail, job.newest - policy.keep))
    if most is not None:
        while (excess := job.size.bytes - most) > 0 and (some := oldest(job.detail, excess)):
            job.drop(some)
        for width in LADDER:
            if job.size.bytes > most:
                job.coarsen(replace(policy, least=width))
    return Outcome(before, job.size, job.dropped, tuple(dict.fromkeys(job.remarks)))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the recording's lock, which ends with the process.

    Raises:
        RecordingError: another process holds it.
        OSError: it cannot be made.
    """
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordingError(
                f"another compact is at work in {directory}; wait until it has ended"
            ) from None
        yield
    finally:
        os.close(lock)


@dataclass
class _Job:
    """One compaction.

    Attributes:
        dropped: parts of detail that were deleted so far.
        remarks: what was left as it is, and why.
    """

    files: RecordingFiles
    dry_run: bool = False
    dropped: int = 0
    remarks: list[str] = field(default_factory=list)
    _pretended: Size = Size(0, 0)

    @cached_property
    def windows(self) -> dict[int, list[Timed]]:
        """Window parts of each rank as they are by now."""
        found = {rank.rank: window_ages(rank) for rank in self.files.ranks}
        self._say(one.fault for own in found.values() for one in own)
        return found

    @cached_property
    def newest(self) -> float:
        """End of the newest window; minus infinity without any."""
        ends = (one.last for own in self.windows.values() for one in own)
        return max((end for end in ends if end == end), default=-inf)

    @cached_property
    def detail(self) -> list[Detail]:
        """Detail that is there by now and may be deleted."""
        found = [
            one
            for rank in self.files.ranks
            for one in detail_ages(rank)
            if one.part.path not in _open_parts(rank)
        ]
        self._say(one.fault for one in found)
        return found

    @property
    def size(self) -> Size:
        """Of the recording without its pyramid; of a dry run, what it would be."""
        pyramid = self.files.directory / FOLDER
        files = [
            path
            for path in self.files.directory.rglob("*")
            if path.is_file() and pyramid not in path.parents
        ]
        parts = sum(path.suffix == ".parquet" for path in files)
        less = self._pretended
        return Size(parts - less.parts, sum(map(bytes_of, files)) - less.bytes)

    def clear(self) -> None:
        """Delete what a run that was broken off has left."""
        for rank in self.files.ranks:
            for path in leftovers(rank, self.files.info, self.remarks):
                if self.dry_run:
                    self._pretend(path.suffix == ".parquet", bytes_of(path))
                else:
                    path.unlink(missing_ok=True)

    def coarsen(self, policy: Policy) -> None:
        """Put windows together as their age allows."""
        for rank in self.files.ranks:
            own = self.windows[rank.rank]
            closed = [one for one in own if one.part.path not in _open_parts(rank)]
            for group in groups(closed, policy, self.newest):
                become = self._put_together(group, rank)
                kept = [one for one in own if one not in group]
                own = sorted([*kept, *become], key=lambda one: one.part.number)
            self.windows[rank.rank] = own

    def _put_together(self, group: list[Timed], rank: RankFiles) -> list[Timed]:
        if not self.dry_run:
            return put_together(group, rank, self.files.info, self.remarks)
        first, last = group[0], group[-1]
        size = max(one.size for one in group)
        self._pretend(len(group) - 1, sum(one.size for one in group) - size)
        part = replace(first.part, stop=last.part.numbers.stop)
        end = max(one.last for one in group)
        return [Timed(part, end, end, first.windows[:1], size)]

    def drop(self, details: Sequence[Detail]) -> None:
        """Delete some detail."""
        for rank in self.files.ranks:
            own = [one for one in details if one.part.rank == rank.rank]
            if own and self.dry_run:
                self._pretend(len(own), sum(one.size for one in own))
            elif own:
                self._gone[rank.rank] = delete_detail(own, rank, self._gone[rank.rank])
            self.dropped += len(own)
        paths = {one.part.path for one in details}
        self.detail = [one for one in self.detail if one.part.path not in paths]

    @cached_property
    def _gone(self) -> dict[int, Dropped]:
        return {rank.rank: rank.dropped for rank in self.files.ranks}

    def _say(self, faults: Iterable[str]) -> None:
        self.remarks += [f"{fault}: left as it is" for fault in faults if fault]

    def _pretend(self, parts: int, size: int) -> None:
        self._pretended = Size(self._pretended.parts + parts, self._pretended.bytes + size)


def _open_parts(rank: RankFiles) -> set[Path]:
    """The last part of each kind, of a rank that may go on; none of one that was stopped."""
    if rank.state is not None and rank.state.state == "stopped":
        return set()
    last = {part.kind: part.path for part in rank.parts}
    return set(last.values())
