"""Megatron-core's router traces (``--moe-routing-trace-path``): the experts of every token.

``router_trace_rank{r}.jsonl``, of ``megatron/core/transformer/moe/router_trace.py``: a line for
each layer of each step with ``step``, ``stage``, ``block`` (``decoder`` or ``mtp``, then with
``mtp_idx``), ``layer``, ``rank``, ``num_tokens``, ``topk`` and ``top_indices`` [num_tokens][topk].
``logit_shape`` is there where logits were saved, and says how many experts there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.documents import mentions
from routeprof.formats.expert_ids import UNSEEN, layers_of, whole_ids, within
from routeprof.formats.json_lines import objects
from routeprof.formats.source import Source, Step, Told
from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer, ModelInfo, RankRole

NAME = re.compile(r"router_trace_rank\d+\.jsonl")
MOST_LAYERS, MOST_RANKS = 1 << 14, 1 << 16

INTENT = (
    "choices are the router's, before anything above a capacity is dropped; a layer whose router "
    "itself drops is missing from the steps in which it did, as Megatron does not trace it then"
)
STAGES = (
    "layers are numbered from 0 in each pipeline stage where hooks wrote the trace, and the file "
    "does not say which stage it is: convert the ranks of each stage by themselves"
)
AGAIN = (
    "layers have several records of a step: micro-batches of training, or passes that were "
    "computed again, which Megatron traces alike"
)
TWINS = "hold the very choices of another rank: taken to have seen the same tokens, counted once"


def is_megatron(path: Path) -> bool:
    """A rank's file, or a directory with some."""
    if path.is_dir():
        return any(NAME.fullmatch(one.name) for one in path.iterdir())
    return mentions(path, "stage", "block", "topk", "top_indices")


def read_megatron(paths: Sequence[Path], told: Told) -> Source:
    """The traces of the ranks of one run.

    Raises:
        UsageError: a line is no record, two files are of one rank or of different models, or
            there are no records.
    """
    files = [_survey(file) for path in paths for file in _files(path)]
    files = [one for one in files if one.choices]
    if not files:
        raise UsageError(f"{paths[0]} holds no record: pass a trace with tokens")
    if len({one.rank for one in files}) < len(files):
        raise UsageError(f"{files[-1].path} and others are of the same rank: pass each rank once")
    keys = sorted({key for one in files for key in one.choices})
    indices = _indices(keys)
    experts, unseen = _experts(files, told)
    layers = tuple(
        replace(layer, executed=False, note=INTENT) for layer in _layers(files, indices, experts)
    )
    twins = _twins(files)
    steps = (step for one in files for step in _steps(one, indices, experts))
    return Source(
        "megatron",
        layers,
        steps,
        "tokens",
        ModelInfo(engine="megatron"),
        _roles(files, twins),
        (*_notes(files, twins), *unseen),
    )


class _Key(NamedTuple):
    """A layer, as Megatron names it; head is -1 in the decoder."""

    head: int
    layer: int

    @property
    def name(self) -> str:
        if self.head < 0:
            return f"decoder.layers.{self.layer}"
        return f"mtp.layers.{self.head}, layer {self.layer}"


class _Record(NamedTuple):
    """One line; experts is 0 where it does not say it."""

    step: int
    key: _Key
    rank: int
    ids: IntArray
    experts: int


@dataclass
class _File:
    """What must be known of a rank's file before its steps are read.

    Attributes:
        choices: experts of a token, by layer.
        highest: id of an expert.
        experts: 0 where the file does not say it.
        seen: digest of all choices.
        again: a layer has several records of a step.
    """

    path: Path
    rank: int = -1
    choices: dict[_Key, int] = field(default_factory=dict)
    highest: int = -1
    experts: int = 0
    seen: bytes = b""
    again: bool = False


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.iterdir() if NAME.fullmatch(one.name))


def _survey(path: Path) -> _File:
    found, digest = _File(path), blake2b()
    step, layers = None, set[_Key]()
    for record in _records(path):
        if found.rank not in (-1, record.rank):
            raise UsageError(f"{path} is of ranks {found.rank} and {record.rank}: pass one's")
        if found.choices.setdefault(record.key, record.ids.shape[1]) != record.ids.shape[1]:
            raise UsageError(f"{path} has layers with different top-k: pass one model's")
        if record.experts and found.experts not in (0, record.experts):
            raise UsageError(f"{path} has layers with different experts: pass one model's")
        if record.step != step:
            step, layers = record.step, set()
        found.again |= record.key in layers
        layers.add(record.key)
        found.rank, found.experts = record.rank, record.experts or found.experts
        found.highest = max(found.highest, int(record.ids.max(initial=-1)))
        digest.update(repr((record.step, record.key)).encode() + record.ids.tobytes())
    found.seen = digest.digest()
    return found


def _records(path: Path) -> Iterator[_Record]:
    for where, line in objects(path):
        try:
            yield _record(line)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{where} is no record of Megatron's router trace ({error}): mend or remove it"
            ) from None


def _record(line: dict[str, Any]) -> _Record:
    numbers = [line[name] for name in ("step", "layer", "rank", "num_tokens", "topk")]
    numbers.append(line.get("mtp_idx", 0) if line["block"] == "mtp" else 0)
    if any(type(number) is not int or not 0 <= number < 2**31 for number in numbers):
        raise ValueError("a number is not whole, or out of range")
    step, layer, rank, tokens, top_k, head = numbers
    if max(layer, head) >= MOST_LAYERS or rank >= MOST_RANKS:
        raise ValueError("a layer or rank out of range")
    ids = whole_ids(line["top_indices"], tokens, top_k)
    experts = line["logit_shape"][1] if "logit_shape" in line else 0
    if type(experts) is not int or experts < 0:
        raise ValueError("logit_shape")
    key = _Key(head if line["block"] == "mtp" else -1, layer)
    return _Record(step, key, rank, ids, experts)


def _indices(keys: Sequence[_Key]) -> dict[_Key, int]:
    """Index of each layer: the decoder's keep their numbers, those of MTP heads follow."""
    decoder = {key: key.layer for key in keys if key.head < 0}
    after = max(decoder.values(), default=-1) + 1
    heads = [key for key in keys if key.head >= 0]
    return decoder | {key: after + place for place, key in enumerate(heads)}


def _experts(files: Sequence[_File], told: Told) -> tuple[int, tuple[str, ...]]:
    """How many there are: as the files say, as the user does, or as far as any was chosen."""
    said = {one.experts for one in files if one.experts}
    if len(said) > 1:
        raise UsageError(f"{files[0].path} and others are of different models: pass one run's")
    if said or told.experts:
        return (said or {told.experts or 0}).pop(), ()
    return max(one.highest for one in files) + 1, (UNSEEN,)


def _layers(files: Sequence[_File], indices: Mapping[_Key, int], experts: int) -> tuple[Layer, ...]:
    choices: dict[int, int | None] = {}
    for one in files:
        for key, k in one.choices.items():
            if choices.setdefault(indices[key], k) != k:
                raise UsageError(f"{one.path} has another top-k than other ranks: pass one run's")
    names = {index: key.name for key, index in indices.items()}
    return layers_of(files[0].path, choices, experts, names.__getitem__)


def _twins(files: Sequence[_File]) -> dict[int, int]:
    """By rank, the first rank that holds the same choices."""
    first: dict[bytes, int] = {}
    for one in sorted(files, key=lambda one: one.rank):
        first.setdefault(one.seen, one.rank)
    return {one.rank: first[one.seen] for one in files}


def _roles(files: Sequence[_File], twins: Mapping[int, int]) -> dict[int, RankRole]:
    owners = sorted(set(twins.values()))
    world = max(one.rank for one in files) + 1 if len(files) > 1 else 1
    return {
        rank: RankRole(rank, world, rank - owner, owners.index(owner), owns_tokens=rank == owner)
        for rank, owner in twins.items()
    }


def _notes(files: Sequence[_File], twins: Mapping[int, int]) -> Iterator[str]:
    yield STAGES
    if any(one.again for one in files):
        yield AGAIN
    ranks = sorted(twins)
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        yield f"ranks without a file: {', '.join(map(str, missing[:20]))}"
    alike = [rank for rank in ranks if twins[rank] != rank]
    if alike:
        yield f"ranks {', '.join(map(str, alike[:20]))} {TWINS}"


def _steps(file: _File, indices: Mapping[_Key, int], experts: int) -> Iterator[Step]:
    """A step for each run of lines with the same number."""
    for _, lines in groupby(_records(file.path), key=lambda record: record.step):
        ids: dict[int, list[IntArray]] = {}
        for record in lines:
            ids.setdefault(indices[record.key], []).append(within(record.ids, experts))
        yield Step(
            ids={index: np.concatenate(parts) for index, parts in ids.items()}, rank=file.rank
        )
