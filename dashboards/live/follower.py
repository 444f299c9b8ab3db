"""Follower: the sums of a recording that grows. Each part is read once and never again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from routeprof.dashboards.live.kept import Kept
from routeprof.dashboards.live.spans import Span, Spans
from routeprof.dashboards.live.thinning import thinned
from routeprof.recording.batch import Batch, fold_one
from routeprof.recording.fold import Totals, merge, merge_exact, repeated
from routeprof.recording.reader import Part, RecordingFiles
from routeprof.recording.schema import RecordingInfo

TIMELINE_ROWS = 100_000
"""Rows of the timeline to keep; beyond, neighbouring windows are put together."""

BATCH = 16
"""Parts whose sums are in memory at once before they are added up."""

STRETCHES = 64
"""Stretches of time that a recording of few parts is told apart in, at least."""


class Follower:
    """Totals of the parts seen so far.

    Attributes:
        thinned: the timeline is no longer that of single windows.
        waiting: parts that are there and were not read yet.
    """

    def __init__(self, info: RecordingInfo) -> None:
        self.info = info
        self.thinned = False
        self.waiting = 0
        self._parts: set[Path] = set()
        self._windows: dict[tuple[int, int], Part] = {}
        self._unread: dict[Path, tuple[object, str]] = {}
        self._totals = merge([], info)
        self._kept: Kept | None = None
        self._spans = Spans(info)

    def belongs_to(self, files: RecordingFiles) -> bool:
        """Whether the sums are of these files: not after a part or its rank was taken out."""
        present = {part.path for part in files.parts("part")}
        return files.info == self.info and self._parts <= present

    @property
    def damaged(self) -> int:
        """Number of parts that could not be read; they may be restored in place."""
        return len(self._unread)

    @property
    def read(self) -> int:
        """Number of parts that were read."""
        return len(self._parts)

    def update(self, files: RecordingFiles, until: float) -> Totals:
        """Add what is new, or as much of it as can be read in time.

        Args:
            until: when to stop, by ``time.monotonic``, not counting what it takes to see what is
                new; at least one batch is read.
        """
        seconds = until - monotonic()
        parts = files.parts("part")
        fresh = [part for part in parts if part.path not in self._parts]
        self.waiting = len(fresh)
        if self._kept is None and parts:
            self._kept = Kept(parts, self.info)
        # Of a hundred thousand parts it takes as long to see which are new.
        sums = list(self._sums(fresh, files, monotonic() + seconds))
        if sums:
            summed = merge([self._totals, *sums], self.info)
            windows, changed = thinned(summed.windows, TIMELINE_ROWS)
            self.thinned = self.thinned or changed
            self._totals = replace(summed, windows=windows)
        unread = parts if self._unread else []
        lines = [self._unread[part.path][1] for part in unread if part.path in self._unread]
        return replace(self._totals, unread=tuple(lines))

    def between(self, between: tuple[float, float]) -> Totals:
        """The part of the sums whose windows end in this range of seconds since the epoch."""
        return replace(self._spans.between(between), unread=self._totals.unread)

    def spans(self) -> tuple[Span, ...]:
        """Sums of stretches of time that together are all that was read."""
        return self._spans.all()

    def _sums(self, fresh: Sequence[Part], files: RecordingFiles, until: float) -> Iterator[Totals]:
        for own, batch in self._kept.known() if self._kept else ():
            if self._takes(own, batch):
                self.waiting -= len(own)
                self._spans.add(own, batch.totals)
                yield self._thinned(batch.totals)
            if monotonic() >= until:
                return
        yield from self._batches([p for p in fresh if p.path not in self._parts], files, until)
        if self._kept and not self.waiting:
            self._kept.finish()

    def _takes(self, parts: Sequence[Part], batch: Batch) -> bool:
        """Whether no window of these parts is in the sums; now it is."""
        found = {
            (rank, window): parts[place]
            for place, rank, first, last in batch.held.tolist()
            for window in range(first, last + 1)
        }
        if found.keys() & self._windows.keys():
            return False
        self._windows.update(found)
        self._parts.update(part.path for part in parts)
        return True

    def _thinned(self, totals: Totals) -> Totals:
        """With so much of the timeline as will be kept of it."""
        windows, changed = thinned(totals.windows, TIMELINE_ROWS // 32)
        self.thinned = self.thinned or changed
        return replace(totals, windows=windows)

    def _batches(
        self, fresh: Sequence[Part], files: RecordingFiles, until: float
    ) -> Iterator[Totals]:
        size = min(BATCH, max(1, len(fresh) // STRETCHES))
        for start in range(0, len(fresh), BATCH):
            batch = fresh[start : start + BATCH]
            pairs = [(part, self._fold(part, files)) for part in batch]
            self.waiting -= len(batch)
            good = [(part, totals) for part, totals in pairs if totals is not None]
            for first in range(0, len(good), size):
                group = good[first : first + size]
                totals = merge_exact([totals for _, totals in group], files.info)
                self._spans.add([part for part, _ in group], totals)
                yield totals
            if monotonic() >= until:
                return

    def _fold(self, part: Part, files: RecordingFiles) -> Totals | None:
        """Totals of a new part; a damaged one is tried again when its file has changed."""
        stamp = _stamp(part.path)
        if part.path in self._unread and self._unread[part.path][0] == stamp:
            return None
        try:
            batch = fold_one(0, part, files.info)
            totals = batch.totals
            line = totals.unread[0] if totals.unread else repeated(part, totals, self._windows)
        except Exception as error:  # columns of the right names with nonsense in them
            line = f"{part.label} cannot be read: {type(error).__name__}: {error}"
        if line:
            self._unread[part.path] = (stamp, line)
            return None
        self._unread.pop(part.path, None)
        self._parts.add(part.path)
        if self._kept is not None:
            self._kept.add(part, batch)
        return totals


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
