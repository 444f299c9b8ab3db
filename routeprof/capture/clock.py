"""The time of day, which never goes backwards while a process records."""

from __future__ import annotations

from time import monotonic, time

_epoch = time() - monotonic()


def now() -> float:
    """Seconds since the epoch, never less than before.

    A system clock that is set forward is followed, as is one that went on while the machine
    slept. One that is set back is not: time then goes on from where it was.
    """
    # No lock: a child that is forked while another thread held it would wait for ever.
    global _epoch
    _epoch = max(_epoch, time() - monotonic())
    return _epoch + monotonic()
