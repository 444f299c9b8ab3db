"""TensorRT-LLM's expert statistics (``EXPERT_STATISTIC_ITER_RANGE``), a directory of a run.

Of ``tensorrt_llm/_torch/expert_statistic.py``: rank 0 writes ``meta_info.json`` with
``num_experts`` and ``num_experts_per_token``, each rank ``rank{r}.safetensors`` with a count of
every expert, int64 or int32, under the key ``{iteration}_{layer}``. Variants write besides

* ``token_selected_experts_rank{r}.safetensors`` or ``rank{r}_raw.safetensors``: the experts of
  every token, [tokens, experts per token], under the same keys;
* ``ep_size`` in ``meta_info.json``.

Ranks are added up, as ``ep_load_balancer/utils.py`` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.expert_ids import MOST_EXPERTS, layers_of, within
from routeprof.formats.opening import one_of, whole_counts
from routeprof.formats.source import Source, Step
from routeprof.formats.trtllm_files import RankFile, opened, rank_files
from routeprof.metrics._arrays import IntArray
from routeprof.topology import ModelInfo, RankRole

META = "meta_info.json"
COUNTS = r"rank(\d{1,5})\.safetensors"
CHOICES = (r"token_selected_experts_rank(\d{1,5})\.safetensors", r"rank(\d{1,5})_raw\.safetensors")

SLOTS = (
    "where a load balancer was on, these are its slots and not experts: the files do not say "
    "whether one was"
)
SUMMED = (
    "the counts of all ranks are added up, as TensorRT-LLM's own scripts do: ranks that saw the "
    "same tokens have each counted them"
)
TWINS = (
    "all ranks hold the very same counts: taken to have seen the same tokens, and counted once, "
    "which TensorRT-LLM's own scripts do not"
)
IN_PART = "tokens' experts are only a part of what was counted, and not read"


def is_trtllm(path: Path) -> bool:
    """A directory with ``meta_info.json`` and a rank's counts."""
    return (path / META).is_file() and bool(rank_files(path, COUNTS))


def read_trtllm(paths: Sequence[Path]) -> Source:
    """The iterations of one run.

    Raises:
        UsageError: files are missing or damaged, or of different runs.
    """
    run = _run(one_of(paths))
    layers = layers_of(
        run.path,
        dict.fromkeys(run.layers, run.top_k),
        run.experts,
        lambda index: f"model.layers.{index}.mlp",
    )
    notes = (SLOTS, *_notes(run))
    model = ModelInfo(engine="tensorrt-llm")
    if not run.choices:
        return Source("trtllm", layers, _sums(run), "steps", model, notes=notes)
    if not run.whole:
        return Source("trtllm", layers, _sums(run), "steps", model, notes=(*notes, IN_PART))
    roles = {rank: run.role(rank) for rank in run.choices}
    return Source("trtllm", layers, _tokens(run), "tokens", model, roles, notes)


@dataclass(frozen=True)
class _Run:
    """Files of a run.

    Attributes:
        experts, top_k, ranks: as rank 0 says; ranks is None where it does not.
        counts: of experts, by rank; choices: of tokens, by rank, or none.
    """

    path: Path
    experts: int
    top_k: int
    ranks: int | None
    counts: Mapping[int, RankFile]
    choices: Mapping[int, RankFile]

    @cached_property
    def layers(self) -> list[int]:
        return _all([one.layer for one in self.counts.values()])

    @cached_property
    def iterations(self) -> list[int]:
        return _all([one.iteration for one in self.counts.values()])

    @cached_property
    def alike(self) -> bool:
        """Whether several ranks hold the same counts throughout."""
        first, *others = self.counts.values()
        return bool(others) and all(
            _same(first.iteration, other.iteration)
            and _same(first.layer, other.layer)
            and all(
                one_layer == layer and _same(one, values)
                for number in self.iterations
                for (one_layer, one), (layer, values) in zip(
                    first.of(number), other.of(number), strict=True
                )
            )
            for other in others
        )

    @cached_property
    def whole(self) -> bool:
        """Whether the choices are all that was counted."""
        if set(self.choices) != set(self.counts):
            return False
        for rank, file in self.choices.items():
            for number in _all([file.iteration, self.counts[rank].iteration]):
                counted = dict(self.counts[rank].of(number))
                chosen = {
                    layer: np.bincount(self.ids(ids).reshape(-1) + 1, minlength=self.experts + 1)
                    for layer, ids in file.of(number)
                }
                if chosen.keys() != counted.keys() or not all(
                    _same(chosen[layer][1:], values[: self.experts])
                    and chosen[layer].sum() == values.sum()
                    for layer, values in counted.items()
                ):
                    return False
        return True

    def ids(self, values: Any) -> IntArray:
        return within(values.astype(np.int64), self.experts)

    def role(self, rank: int) -> RankRole:
        world = max(self.ranks or 1, max(self.counts) + 1)
        if self.alike:
            return RankRole(rank, world, tp=rank, owns_tokens=rank == min(self.counts))
        return RankRole(rank, world, ep=rank)


def _all(numbers: Sequence[IntArray]) -> list[int]:
    return [int(number) for number in np.unique(np.concatenate(numbers))]


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other))


def _run(path: Path) -> _Run:
    meta = _meta(path / META)
    counts = {rank: opened(file, axes=1) for rank, file in rank_files(path, COUNTS).items()}
    if not any(len(one.iteration) for one in counts.values()):
        raise UsageError(f"{path} holds no counts: pass a run that reached its last iteration")
    choices: dict[int, RankFile] = {}
    for pattern in CHOICES:
        choices |= {rank: opened(one, axes=2) for rank, one in rank_files(path, pattern).items()}
    experts, top_k = meta["num_experts"], meta["num_experts_per_token"]
    for one in counts.values():
        if one.shape.size and not experts <= one.shape.min() <= one.shape.max() <= MOST_EXPERTS:
            raise UsageError(f"{one.path} counts other than {experts} experts: pass one run's")
    for one in choices.values():
        if (one.shape[:, 1:] != top_k).any():
            raise UsageError(
                f"{one.path} has tokens with other than {top_k} experts: pass one run's"
            )
    return _Run(path, experts, top_k, meta.get("ep_size"), counts, choices)


def _meta(path: Path) -> dict[str, int]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(1 << 16))
        whole = {name: found[name] for name in ("num_experts", "num_experts_per_token")}
        whole |= {name: found[name] for name in ("ep_size",) if name in found}
    except FileNotFoundError:
        raise UsageError(f"{path} is missing, which rank 0 writes: copy all ranks' files") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(f"{path} lacks the numbers of experts: pass another copy") from None
    if any(type(number) is not int or not 1 <= number <= MOST_EXPERTS for number in whole.values()):
        raise UsageError(f"{path} has numbers that cannot be: pass another copy")
    return whole


def _notes(run: _Run) -> Iterator[str]:
    if len(run.counts) > 1:
        yield TWINS if run.alike else SUMMED
    expected = max(run.ranks or 1, max(run.counts) + 1)
    missing = [rank for rank in range(expected) if rank not in run.counts]
    if missing:
        yield f"ranks without a file, whose tokens are not counted: {_listed(missing)}"
    first, last = run.iterations[0], run.iterations[-1]
    if last - first + 1 != len(run.iterations):
        yield f"{last - first + 1 - len(run.iterations)} iterations between others are missing"
    places = len(run.iterations) * len(run.layers) * len(run.counts)
    lacking = places - sum(len(one.iteration) for one in run.counts.values())
    if lacking:
        yield f"{lacking} of {places} records of a rank's layer in an iteration are missing"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "")


def _sums(run: _Run) -> Iterator[Step]:
    """A step for each iteration, with the counts of all ranks."""
    files = list(run.counts.values())[: 1 if run.alike else None]
    for number in run.iterations:
        counts: dict[int, IntArray] = {}
        invalid: dict[int, int] = {}
        for file in files:
            for layer, values in file.of(number):
                own = whole_counts(values, str(file.path))
                if own.sum() % run.top_k:
                    raise UsageError(
                        f"{file.path} has {own.sum():,} choices in iteration {number}, layer "
                        f"{layer}, which {run.top_k} for each token do not make: pass one run's"
                    )
                counts[layer] = counts.get(layer, 0) + own[: run.experts]
                invalid[layer] = invalid.get(layer, 0) + int(own[run.experts :].sum())
        yield Step(counts, invalid=invalid)


def _tokens(run: _Run) -> Iterator[Step]:
    """A step for each iteration and rank."""
    for number in run.iterations:
        for rank, file in run.choices.items():
            ids = {layer: run.ids(values) for layer, values in file.of(number)}
            if ids:
                yield Step(ids=ids, rank=rank)
