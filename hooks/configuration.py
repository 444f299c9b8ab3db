"""What a model's configuration says, in JSON's own types."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan
from numbers import Integral, Real
from typing import Any

CLASSES = ("PreTrainedConfig", "PretrainedConfig")
"""What transformers 5 and 4 call the class of all configurations."""


def configuration(config: Any) -> dict[str, Any] | None:
    """All values of a transformers configuration, as its config.json has them.

    Also those that are the class's defaults, which a config.json may leave out: another version
    may have others. What JSON cannot hold is written as text, and a number that is not finite as
    transformers 5 writes it, ``{"__float__": "Infinity"}``.

    Returns:
        None where ``config`` is something else, or cannot be read: an engine must not fail by it.
    """
    try:
        if not any(_is_base(kind) for kind in type(config).__mro__):
            return None
        found = _plain(config)
    except Exception:
        return None
    return found if isinstance(found, dict) else None


def _is_base(kind: type) -> bool:
    return kind.__name__ in CLASSES and kind.__module__.partition(".")[0] == "transformers"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(to_dict := getattr(value, "to_dict", None)):
        return _plain(to_dict())
    return str(value).removeprefix("torch.")


def _number(value: float) -> Any:
    if isfinite(value):
        return value
    return {"__float__": "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"}
