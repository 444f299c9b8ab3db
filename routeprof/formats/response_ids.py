"""Routed experts in single API responses of vLLM and SGLang.

* vLLM 0.32 (``entrypoints/openai``): ``choices[].routed_experts`` is base64 of an .npy file,
  [tokens, layers, top_k]; the last token was not run, so it has no row. Older ones wrote lists,
  and those of the prompt apart, as ``prompt_routed_experts``.
* SGLang 0.5.23: ``meta_info.routed_experts`` is base64 of int32 without a shape.

Both leave zeros in layers without experts, and may begin later than the prompt, as was asked.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.opening import HEADER_DAMAGE, reason_of
from routeprof.formats.source import Told
from routeprof.metrics._arrays import IntArray

MAGIC = b"\x93NUMPY"
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError),
    *HEADER_DAMAGE,
)
"""What a damaged response makes of the parsers."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Routes:
    """What one generated sequence says.

    Attributes:
        ids: int64 [rows, layers, top_k], a row for each token from ``start`` on.
        start: position of the first row; None where that cannot be told.
        prompt: tokens of the prompt; None where that is not known.
        cached: tokens of the prompt that were not computed; None where that is not known.
        again: its prompt is that of another sequence, and perhaps was computed with it.
    """

    ids: IntArray
    start: int | None
    prompt: int | None
    cached: int | None
    again: bool = False


def routes_of(response: Json, told: Told, where: str) -> list[Routes]:
    """All sequences of a response that say where their tokens went.

    Raises:
        UsageError: they are damaged, or lack a shape that was not told.
    """
    try:
        if "choices" in response:
            return _of_choices(response, told)
        return [one for one in [_of_meta(response["meta_info"], told)] if one]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except DAMAGE as error:
        reason = reason_of(error)
        raise UsageError(
            f"{where} is no response with routed experts ({reason}): pass another file"
        ) from None


def _of_meta(meta: Json, told: Told) -> Routes | None:
    """SGLang's own response, or a choice that has its ``meta_info``."""
    if meta.get("routed_experts") is None:
        return None
    ids = _decoded(meta["routed_experts"], told)
    prompt, made = _number(meta, "prompt_tokens"), _number(meta, "completion_tokens")
    start = None if prompt is None or made is None else _start(len(ids), prompt, made)
    return Routes(ids, start, prompt, _number(meta, "cached_tokens"))


def _of_choices(response: Json, told: Told) -> list[Routes]:
    choices: list[Json] = response["choices"]
    metas = [choice.get("meta_info") or {} for choice in choices]
    if any("routed_experts" in meta for meta in metas):
        return [one for meta in metas if (one := _of_meta(meta, told))]
    tables = [_decoded(one.get("routed_experts"), told) for one in choices]
    usage: Json = response.get("usage") or {}
    prompt = _number(usage, "prompt_tokens")
    if prompt is None and isinstance(response.get("prompt_token_ids"), list):
        prompt = len(response["prompt_token_ids"])
    details: Json = usage.get("prompt_tokens_details") or {}
    cached = _number(details, "cached_tokens")
    apart = response.get("prompt_routed_experts")
    if apart is not None:
        return _joined(_decoded(apart, told), tables, prompt, cached)
    starts = _starts(tables, [_made(one) for one in choices], prompt, usage)
    return [
        Routes(ids, start, prompt, cached, again=number > 0)
        for number, (ids, start) in enumerate(zip(tables, starts, strict=True))
        if ids.size
    ]


def _made(choice: Json) -> int | None:
    tokens = choice.get("token_ids")
    return len(tokens) if isinstance(tokens, list) else None


def _starts(
    tables: list[IntArray], made: list[int | None], prompt: int | None, usage: Json
) -> list[int | None]:
    """Where each table begins: its rows end before the last token that was generated.

    All choices of a request begin at the same place, so that the sum of their tokens tells it.
    """
    total = _number(usage, "completion_tokens")
    if prompt is None or not tables:
        return [None] * len(tables)
    if all(one is not None for one in made):
        total = sum(one for one in made if one is not None)
    if total is None or not all(ids.size for ids in tables):
        return [None] * len(tables)
    rows = sum(len(ids) for ids in tables)
    each, rest = divmod(total - len(tables) - rows, len(tables))
    if rest:
        return [None] * len(tables)
    return [_start(0, prompt, each + 1)] * len(tables)


def _start(rows: int, prompt: int, made: int) -> int:
    start = prompt + made - 1 - rows
    if start < 0:
        raise UsageError(
            f"{rows} rows of routed experts are more than {prompt} tokens of prompt and {made} "
            "generated ones make: check the response, or --layers and --top-k"
        )
    return start


def _joined(
    prompt_ids: IntArray, tables: list[IntArray], prompt: int | None, cached: int | None
) -> list[Routes]:
    """Choices where the prompt has a table of its own."""
    length = len(prompt_ids) if prompt is None else prompt
    if not prompt_ids.size:
        return [Routes(ids, length, length, cached) for ids in tables if ids.size]
    first = length - len(prompt_ids)
    if first < 0:
        raise UsageError(f"{len(prompt_ids)} rows are more than the prompt's {length} tokens")
    whole = np.concatenate([prompt_ids, *[ids for ids in tables[:1] if ids.size]])
    others = [Routes(ids, length, length, cached, again=True) for ids in tables[1:] if ids.size]
    return [Routes(whole, first, length, cached), *others]


def _number(facts: Json, name: str) -> int | None:
    found = facts.get(name)
    if found is None:
        return None
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"{name} is {found!r}")
    return found


def _decoded(value: Any, told: Told) -> IntArray:
    """Ids [rows, layers, top_k]; [0, 0, 0] where there are none."""
    if value is None or (isinstance(value, list) and not value):
        return np.zeros((0, 0, 0), dtype=np.int64)
    if isinstance(value, str):
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"no base64: {error}") from None
        ids = _of_npy(data) if data.startswith(MAGIC) else _of_raw(data, told)
    else:
        ids = np.asarray(value)
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise ValueError(f"ids are {ids.dtype} of shape {ids.shape}, not [tokens, layers, top_k]")
    return ids.astype(np.int64)


def _of_npy(data: bytes) -> np.ndarray[Any, Any]:
    """An array, which takes no more memory than its bytes whatever its header promises."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of version {version}")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return np.frombuffer(data[file.tell() :], dtype).reshape(shape, order="F" if fortran else "C")


def _of_raw(data: bytes, told: Told) -> np.ndarray[Any, Any]:
    if told.layers is None or told.top_k is None:
        raise UsageError(
            "SGLang's routed experts come without a shape: convert them with --layers (all of the "
            "model, num_hidden_layers) and --top-k (num_experts_per_tok)"
        )
    ids = np.frombuffer(data, "<i4")
    rows, rest = divmod(ids.size, told.layers * told.top_k)
    if rest:
        raise UsageError(
            f"{ids.size} ids are no whole tokens of {told.layers} layers with {told.top_k} "
            "experts: pass the model's --layers and --top-k"
        )
    ids = ids.reshape(rows, told.layers, told.top_k)
    ordered = np.sort(ids, axis=2)
    same = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if (same.any(axis=2) & ~same.all(axis=2)).any():
        raise UsageError(
            f"with {told.layers} layers and {told.top_k} experts a token would choose an expert "
            "twice: pass the model's --layers and --top-k"
        )
    return ids


def each_response(found: Iterator[tuple[str, Json]], told: Told) -> Iterator[Routes]:
    """Sequences of all responses, one after another."""
    for where, response in found:
        yield from routes_of(response, told, where)
