"""Any path that a verb is given, as a recording."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from routeprof.errors import NotARecordingError, UsageError
from routeprof.recording.places import is_remote, listing, place


def as_recording(path: str | Path) -> Path:
    """A recording's directory as it is; for another tool's file a recording that was made of it.

    What was made lies in a temporary directory until the process ends.

    Raises:
        NotARecordingError: the path is neither.
        UsageError: as ``read``.
        UnreachableError: it cannot be listed.
    """
    path = place(path)
    with listing(path):
        if is_remote(path) or (path.is_dir() and any(path.glob("rank-*"))) or not path.exists():
            return path
    # Only now: all readers are behind it, and recordings need none.
    from routeprof.formats import FORMATS, convert, recognised
    from routeprof.formats.refused import why_refused

    name = recognised(path)
    if name is None:
        if path.is_dir():
            return path
        if reason := why_refused(path):
            raise UsageError(f"{path} {reason}")
        raise NotARecordingError(
            f"{path} is neither a recording nor a file that routeprof reads: pass a recording's "
            f"directory, or one of {', '.join(FORMATS)} (routeprof convert --help)"
        )
    made = Path(tempfile.mkdtemp(prefix="routeprof-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return convert([path], made / path.name, name)
