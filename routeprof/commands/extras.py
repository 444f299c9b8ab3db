"""What to say where an optional dependency is missing."""

from __future__ import annotations

from importlib.util import find_spec

from routeprof.errors import MissingExtraError


def need(package: str, extra: str) -> None:
    """Go on only if the package is there.

    Raises:
        MissingExtraError: it is not; the message says how to install it.
    """
    if find_spec(package) is None:
        raise MissingExtraError(package, extra)
