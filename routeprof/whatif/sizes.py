"""Sizes of a recorded model's experts, in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routeprof.errors import UsageError
from routeprof.placements import placed
from routeprof.tables import moe_layers
from routeprof.whatif.cost import Sizes

if TYPE_CHECKING:
    from routeprof.profile import Profile

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def sizes_of(
    profile: Profile,
    *,
    width: int | None = None,
    weight: float | None = None,
    dispatch: float | None = None,
    combine: float | None = None,
) -> Sizes:
    """What the recording says, unless told otherwise.

    Args:
        width: inner width of an expert.
        weight, dispatch, combine: bytes of a number; those of the model's type if None.

    Raises:
        UsageError: something is neither recorded nor told, or not positive.
    """
    model = profile.info.model
    item = ITEM_BYTES.get(model.dtype)
    width = model.expert_width if width is None else width
    if model.hidden_size is None:
        raise UsageError(
            "the recording does not say how wide a token is: record the model itself, not a part"
        )
    if width is None:
        raise UsageError(
            "the recording does not say how wide an expert is: pass --expert-width, the model's "
            "moe_intermediate_size"
        )
    numbers = [item if own is None else own for own in (weight, dispatch, combine)]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise UsageError(
            f"{model.dtype or 'the type of the model'} has no known size: pass --weight-bytes, "
            f"--dispatch-bytes and --combine-bytes"
        )
    if width < 1 or not all(0 < number <= 16 for number in known):
        raise UsageError(
            "an expert's width or the bytes of a number are not positive: pass a width of 1 or "
            "more, and up to 16 bytes"
        )
    return Sizes(model.hidden_size, width, *known)


def expert_bytes(profile: Profile) -> int:
    """Bytes of one expert in one layer, in the model's own type.

    Raises:
        UsageError: the recording does not say.
    """
    model = profile.info.model
    if not (model.hidden_size and model.expert_width and model.dtype in ITEM_BYTES):
        raise UsageError(
            "the recording does not say how large an expert is: pass --expert-bytes, its size in "
            "one layer"
        )
    sizes = sizes_of(profile)
    return int(sizes.expert * sizes.weight)


def least_experts(profile: Profile) -> int:
    """Experts that need a place, of the layer that has the fewest; at least 1."""
    return min((placed(layer) for _, layer in moe_layers(profile) if placed(layer)), default=1)
