"""Which tensors of a checkpoint are weight matrices of routed experts, by their names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.plan.audit.checkpoint import Tensor, tensors_of

FLOATS = ("BF16", "F16", "F32")
"""Types that can be audited: what they hold has not been rounded to 8 bits or fewer."""

_EACH = re.compile(r"(?P<layer>.+)\.experts\.(?:expert_)?(?P<expert>\d+)\.(?P<matrix>.+)")
_STACKED = re.compile(r"(?P<layer>.+)\.experts\.(?P<matrix>[^\d].*)")
_GRANITE = re.compile(r"(?P<layer>.+moe)\.(?P<matrix>(?:in|out)put_linear\.weight)")
_SHARED = re.compile(r"shared_expert|bias$|_bias\b|e_score_correction")
_SCALES = re.compile(r"scale|zero|g_idx|_shape$|amax")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")

TRANSPOSED_MODELS = ("llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Model types whose stacked experts are [experts, inputs, outputs]."""


@dataclass(frozen=True)
class Part:
    """One expert's matrix: ``rows`` x ``columns`` elements from byte ``start`` of the file.

    Rows are outputs and columns inputs, or the other way round where ``transposed``.
    """

    tensor: Tensor
    expert: int
    start: int
    rows: int
    columns: int
    transposed: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def outputs(self) -> int:
        return self.columns if self.transposed else self.rows

    @property
    def inputs(self) -> int:
        return self.rows if self.transposed else self.columns


@dataclass(frozen=True)
class Matrix:
    """One matrix of all experts of a layer.

    Attributes:
        layer: path of the module, such as ``model.layers.3.mlp``.
        index: the layer's number, the first in its path; -1 where there is none.
        name: such as ``gate_proj``.
        dtype: as safetensors calls it.
        parts: one an expert, sorted.
    """

    layer: str
    index: int
    name: str
    dtype: str
    parts: tuple[Part, ...]


@dataclass
class Found:
    """What can be audited, and the tensors of experts that cannot, by the reason."""

    matrices: list[Matrix] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)


def experts_of(source: str | Path) -> Found:
    """The expert matrices of a checkpoint, by the headers alone.

    Args:
        source: a model's directory, or one file.

    Raises:
        UsageError: no such checkpoint, a broken one, or one without experts to audit.
    """
    source = Path(source)
    return find_experts(tensors_of(source), read_config(source))


def find_experts(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Found:
    """Sort the tensors of experts by layer, matrix and expert.

    Raises:
        UsageError: there are none, or none that could be audited, or experts are missing.
    """
    found, groups = Found(), {}  # type: ignore[var-annotated]
    for tensor in tensors.values():
        match = _match(tensor.name)
        if match is None:
            continue
        reason = _why_not(tensor, match, config)
        if reason is None:
            name = match["matrix"].removesuffix(".weight")
            groups.setdefault((match["layer"], name), []).append((match, tensor))
        elif reason:
            found.skipped.setdefault(reason, []).append(tensor.name)
    for (layer, name), members in groups.items():
        found.matrices.append(_matrix(layer, name, members, config))
    found.matrices.sort(key=lambda one: (one.index, one.layer, one.name))
    if not found.matrices:
        raise UsageError(_nothing(found.skipped))
    return found


def _match(name: str) -> re.Match[str] | None:
    if _SHARED.search(name):
        return None
    return _EACH.fullmatch(name) or _STACKED.fullmatch(name) or _GRANITE.fullmatch(name)


def _why_not(tensor: Tensor, match: re.Match[str], config: Mapping[str, Any]) -> str | None:
    """None for a matrix that can be audited; empty for what is no matrix at all."""
    matrix = match["matrix"]
    if len(tensor.shape) < 2 or _SCALES.search(matrix):
        return ""
    if tensor.dtype in FLOATS:
        one_each = match.groupdict().get("expert") is not None
        known = len(tensor.shape) == 2 if one_each else _stack(tensor, config) is not None
        return None if known else "of a layout that routeprof does not know"
    if matrix.endswith("_blocks") and tensor.dtype == "U8":
        return "MXFP4"
    if tensor.dtype.startswith("F8"):
        return "FP8"
    return f"packed {tensor.dtype}"


def _nothing(skipped: Mapping[str, list[str]]) -> str:
    if skipped:
        kinds = " and ".join(sorted(skipped))
        return f"the experts are {kinds}; audit the checkpoint that they were made from"
    return "no expert weights in the checkpoint; pass a Mixture-of-Experts model"


def _matrix(
    layer: str,
    name: str,
    members: Iterable[tuple[re.Match[str], Tensor]],
    config: Mapping[str, Any],
) -> Matrix:
    parts: list[Part] = []
    for match, tensor in members:
        number = match.groupdict().get("expert")
        if number is None:
            parts += _slices(name, tensor, config)
        else:
            rows, columns = tensor.shape
            parts.append(Part(tensor, int(number), tensor.start, rows, columns))
    parts.sort(key=lambda part: part.expert)
    alike = {(part.rows, part.columns, part.tensor.dtype) for part in parts}
    if [part.expert for part in parts] != list(range(len(parts))):
        raise UsageError(f"experts of {layer} {name} are missing; download the checkpoint again")
    if len(alike) != 1 or not parts[0].elements:
        raise UsageError(f"experts of {layer} {name} differ in shape; check the checkpoint")
    numbers = _NUMBER.findall(layer)
    index = int(numbers[0]) if numbers else -1
    return Matrix(layer, index, name, parts[0].tensor.dtype, tuple(parts))


def _stack(tensor: Tensor, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Experts, rows and columns of [experts, rows, columns] or [experts · rows, columns] (DBRX)."""
    shape, experts = tensor.shape, _experts(config)
    if len(shape) == 2 and experts and shape[0] % experts == 0:
        return experts, shape[0] // experts, shape[1]
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else None


def _slices(name: str, tensor: Tensor, config: Mapping[str, Any]) -> list[Part]:
    stack = _stack(tensor, config)
    assert stack is not None  # _why_not has looked
    count, rows, columns = stack
    turned = _transposed(name, rows, columns, config)
    step = tensor.nbytes // max(count, 1)
    return [
        Part(tensor, expert, tensor.start + expert * step, rows, columns, turned)
        for expert in range(count)
    ]


def _transposed(name: str, rows: int, columns: int, config: Mapping[str, Any]) -> bool:
    """Whether outputs are the last axis: told by the hidden size, else by the model's type."""
    texts = config.get("text_config")
    kinds = {config.get("model_type"), texts.get("model_type") if isinstance(texts, dict) else None}
    hidden = _setting(config, "hidden_size", "d_model")
    if hidden is not None and (rows == hidden) != (columns == hidden):
        down = re.search(r"down|w2|output|fc2|wo", name) is not None
        return (columns == hidden) if down else (rows == hidden)
    return bool(kinds & set(TRANSPOSED_MODELS))


def _experts(config: Mapping[str, Any]) -> int | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    own = _setting(config, *names)
    inner = config.get("ffn_config")
    return own or (_setting(inner, *names) if isinstance(inner, dict) else None)


def _setting(config: Mapping[str, Any], *names: str) -> int | None:
    texts = config.get("text_config")
    for place in (config, texts if isinstance(texts, dict) else {}):
        for name in names:
            if isinstance(place.get(name), int) and place[name] > 0:
                return int(place[name])
    return None


def read_config(source: Path) -> dict[str, Any]:
    """``config.json`` beside the weights; empty where there is none.

    Raises:
        UsageError: it is there and cannot be read.
    """
    file = (source if source.is_dir() else source.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UsageError(f"{file} is not a model's config; download it again")
    return config
