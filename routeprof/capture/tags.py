"""Tags: labels of the steps that begin inside a block."""

from __future__ import annotations

import re

from routeprof.errors import InvalidTagError

RESERVED_TAGS = ("all", "untagged")
MAX_TAG_LENGTH = 200
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")


def check_tag(tag: str) -> str:
    """The tag itself, if it can be written to every format as it is.

    Raises:
        InvalidTagError: it is empty or too long, has control characters or line breaks, would
            be a formula in a spreadsheet, or means the sum in tables.
    """
    if not isinstance(tag, str) or not tag.strip():
        raise InvalidTagError("a tag must be text with at least one visible character")
    if len(tag) > MAX_TAG_LENGTH:
        raise InvalidTagError(f"a tag may have {MAX_TAG_LENGTH} characters, this one {len(tag)}")
    if _UNSAFE.search(tag):
        raise InvalidTagError(f"tag {tag!r} has control characters; remove them")
    if tag[0] in "=+-@":
        raise InvalidTagError(
            f"tag {tag!r} would be a formula in a spreadsheet; begin it with another character"
        )
    if tag in RESERVED_TAGS:
        raise InvalidTagError(f"tag {tag!r} is reserved for sums; choose another name")
    return tag
