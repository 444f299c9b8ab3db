"""Whether two recordings are of the same model, as far as they tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routeprof.tables import moe_layers, tag_name

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.recording.fold import Key


def incomparable(one: Profile, other: Profile) -> str:
    """Why two recordings cannot be compared, in one sentence; empty if they can.

    What a converted file does not say is no difference.
    """
    mine, theirs = ({layer.index: layer for _, layer in moe_layers(item)} for item in (one, other))
    if not mine:
        return "The model has no MoE layer."
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        return f"These are not the same layers: only one of the two has MoE layer {odd[0]}."
    for index, layer in sorted(mine.items()):
        for name, label in (("experts", "experts"), ("top_k", "experts per token")):
            a, b = getattr(layer, name), getattr(theirs[index], name)
            if a != b and None not in (a, b):
                return f"Layer {index} has {a} {label} in A and {b} in B: not the same model."
    return ""


def caveats(one: Profile, other: Profile) -> Iterator[str]:
    """What a reader of the differences must know, a sentence each."""
    if one.info.id == other.info.id:
        yield "A and B are of the same recording: what is in both is held against itself"
    for label, name in (("model", "name"), ("engine", "engine"), ("engine", "engine_version")):
        a, b = getattr(one.info.model, name), getattr(other.info.model, name)
        if a and b and a != b:
            yield f"the {label} is {a} in A and {b} in B"
    if any(None in pair for pair in _choices(one, other)):
        yield "experts per token are not known on one side: it may be another model"
    for label, profile in (("A", one), ("B", other)):
        for index, state in zip(
            (layer.index for layer in profile.info.layers), profile.states, strict=True
        ):
            if state in ("silent", "unsupported"):
                yield f"layer {index} is {state} in {label}: not compared"
    for label, keys in (("A", lacking(other, one)), ("B", lacking(one, other))):
        if keys:
            yield f"only in {label}, not compared: {', '.join(map(key_text, keys))}"


def lacking(one: Profile, other: Profile) -> list[Key]:
    """Phases and tags that the other one has and this one has not."""
    return [key for key in _busy(other) if key not in _busy(one)]


def shared(one: Profile, other: Profile) -> list[Key]:
    """Phases and tags with assignments in both."""
    return [key for key in _busy(one) if key in _busy(other)]


def key_text(key: Key) -> str:
    """A phase and its tag in words."""
    return f"{key[0]}, tag {tag_name(key[1])!r}" if key[1] is not None else key[0]


def _busy(profile: Profile) -> list[Key]:
    counts = profile.totals.lists["counts"]
    return [key for key, own in zip(profile.totals.keys, counts, strict=True) if own.any()]


def _choices(one: Profile, other: Profile) -> Iterator[tuple[int | None, int | None]]:
    pairs = zip(moe_layers(one), moe_layers(other), strict=True)
    return ((mine.top_k, theirs.top_k) for (_, mine), (_, theirs) in pairs)
