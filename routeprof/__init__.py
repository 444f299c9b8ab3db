"""routeprof: routing and load-balance profiler for Mixture-of-Experts inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routeprof import errors

__version__ = "0.1.0"
__all__ = ["LayerSpec", "Profile", "Recording", "errors", "load", "record"]

if TYPE_CHECKING:
    from routeprof.capture.recorder import Recording
    from routeprof.hooks.discovery import LayerSpec
    from routeprof.hooks.transformers import record
    from routeprof.profile import Profile, load

_HOMES = {
    "LayerSpec": "routeprof.hooks.discovery",
    "Profile": "routeprof.profile",
    "Recording": "routeprof.capture.recorder",
    "load": "routeprof.profile",
    "record": "routeprof.hooks.transformers",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: the engine needs no pandas, the CLI no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'routeprof' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
