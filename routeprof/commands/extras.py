"""What verbs share: optional dependencies, and manners beside a serving engine."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec

from routeprof.errors import MissingExtraError


def need(package: str, extra: str) -> None:
    """Go on only if the package is there.

    Raises:
        MissingExtraError: it is not; the message says how to install it.
    """
    found = None
    with suppress(ModuleNotFoundError):  # a package around it is not there either
        found = find_spec(package)
    if found is None:
        raise MissingExtraError(package, extra)


def make_way() -> None:
    """Leave the processors to whoever serves the model on this machine."""
    with suppress(OSError, AttributeError):  # not everywhere
        os.nice(10)
