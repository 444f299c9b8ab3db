"""Sizes of a recorded model's experts, in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routeprof.errors import UsageError
from routeprof.placements import placed
from routeprof.plan.config import stored_as
from routeprof.tables import moe_layers
from routeprof.whatif.cost import Sizes

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.topology import ModelInfo

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
QUANTISED_BYTES = {"fp8": 1}
"""Of an expert's weight by the ``quant_method`` of its checkpoint; scales are left out."""


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
        weight, dispatch, combine: bytes of a number; those of the model's type if None, which for
            a weight is that of its quantised checkpoint.

    Raises:
        UsageError: something is neither recorded nor told, or not positive.
    """
    model = profile.info.model
    item, stored = ITEM_BYTES.get(model.dtype), _weight_bytes(model)
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
    numbers = {
        "--weight-bytes": stored if weight is None else weight,
        "--dispatch-bytes": item if dispatch is None else dispatch,
        "--combine-bytes": item if combine is None else combine,
    }
    known = [number for number in numbers.values() if number is not None]
    if len(known) < len(numbers):
        lacking = ", ".join(option for option, number in numbers.items() if number is None)
        what = f"a weight in {_method(model):.20}" if item else model.dtype
        raise UsageError(f"{what or 'the type of the model'} has no known size: pass {lacking}")
    if width < 1 or not all(0 < number <= 16 for number in known):
        raise UsageError(
            "an expert's width or the bytes of a number are not positive: pass a width of 1 or "
            "more, and up to 16 bytes"
        )
    return Sizes(model.hidden_size, width, *known)


def _weight_bytes(model: ModelInfo) -> int | None:
    """Of a weight of an expert; None where it is not known."""
    method = _method(model)
    return QUANTISED_BYTES.get(method) if method else ITEM_BYTES.get(model.dtype)


def _method(model: ModelInfo) -> str:
    return "" if model.config is None else stored_as(model.config)


def expert_bytes(profile: Profile) -> int:
    """Bytes of one expert in one layer, as its checkpoint has them.

    Raises:
        UsageError: the recording does not say.
    """
    model = profile.info.model
    if not (model.hidden_size and model.expert_width and _weight_bytes(model)):
        raise UsageError(
            "the recording does not say how large an expert is: pass --expert-bytes, its size in "
            "one layer"
        )
    sizes = sizes_of(profile, dispatch=1, combine=1)  # nothing is sent
    return int(sizes.expert * sizes.weight)


def least_experts(profile: Profile) -> int:
    """Experts that need a place, of the layer that has the fewest; at least 1."""
    return min((placed(layer) for _, layer in moe_layers(profile) if placed(layer)), default=1)
