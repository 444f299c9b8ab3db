"""Expert ids as lists and as the bytes of a tokens part, by the words of docs/recording.md."""

from __future__ import annotations

from collections.abc import Sequence


def as_bytes(ids: Sequence[int | None], experts: int) -> bytes:
    """Of ids of which None is outside the range."""
    wide = experts > 256 or (experts == 256 and None in ids)
    size = 2 if wide else 1
    nobody = 256**size - 1
    return b"".join((nobody if one is None else one).to_bytes(size, "little") for one in ids)


def as_list(data: bytes, count: int, experts: int) -> list[int | None]:
    """The ids, ``count`` of them."""
    size = len(data) // count if count else 1
    found = [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
    nobody = None if size == 1 and experts == 256 else 256**size - 1
    return [None if one == nobody else one for one in found]
