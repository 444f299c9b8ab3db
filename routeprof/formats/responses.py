"""Routed experts in API responses of vLLM and SGLang, one response a line.

A response has its own tokens alone. Which others ran in the same step of the engine it does not
say, so nothing is said of steps: a piece of a request is not one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.formats.documents import documents, mentions
from routeprof.formats.expert_ids import MOST_EXPERTS, UNSEEN, layers_of, within
from routeprof.formats.response_ids import Routes, each_response
from routeprof.formats.source import Source, Step, Told
from routeprof.metrics._arrays import IntArray
from routeprof.topology import Layer, ModelInfo

APART = (
    "each response has its own tokens alone: which of them ran together in a step of the engine, "
    "and when, is not known"
)
CACHE = (
    "{:,} responses do not say how much of the prompt was in the prefix cache: what was may be "
    "counted again, though it was not computed"
)
CACHED = "{:,} rows are of prompt tokens in the prefix cache, not computed again: left out"
AGAIN = "{:,} prompt rows of further choices of one request repeat the first choice's: left out"
EMPTY = "{:,} rows are zeros in every layer, as for tokens that were not captured: left out"
PARTLY = (
    "{:,} choices are zeros in some layers of a token, as where nothing was captured: counted as "
    "invalid"
)
UNPLACED = (
    "{:,} responses do not say how long the prompt was (usage), so that prefill and decode cannot "
    "be told apart, and positions count from the first row"
)
DENSE = (
    "layers {} have zeros alone and are taken to be dense: a layer whose kernel hands out no "
    "choices would look the same"
)


def is_responses(path: Path) -> bool:
    """JSON that mentions routed experts."""
    return mentions(path, "routed_experts")


def read_responses(paths: Sequence[Path], told: Told) -> Source:
    """Tokens of all responses, with the phases that their positions tell.

    Raises:
        UsageError: damaged responses, of different models, or without a single choice.
    """
    survey = _Survey()
    for routes in _all(paths, told):
        survey.add(routes)
    if survey.used is None or not survey.used.any():
        raise UsageError(
            f"{paths[0]} has no routed experts but zeros: start the engine with "
            "--enable-return-routed-experts, and ask for them in each request"
        )
    experts = told.experts or survey.highest + 1
    _, top_k = survey.shape
    kept = np.flatnonzero(survey.used).tolist()
    moe = layers_of(paths[0], dict.fromkeys(kept, top_k), experts, lambda index: f"layer {index}")
    dense = tuple(
        Layer(int(index), f"layer {index}", kind="dense") for index in np.flatnonzero(~survey.used)
    )
    notes = survey.notes() if told.experts else (*survey.notes(), UNSEEN)
    layers = tuple(sorted((*moe, *dense), key=lambda layer: layer.index))
    steps = _steps(_all(paths, told), kept, experts)
    model = ModelInfo(name=_model(paths[0]))
    return Source("responses", layers, steps, "tokens", model, notes=notes, batches=False)


def _all(paths: Sequence[Path], told: Told) -> Iterator[Routes]:
    found: Iterator[tuple[str, dict[str, Any]]] = chain.from_iterable(map(documents, paths))
    return each_response(found, told)


def _model(path: Path) -> str:
    name = next(documents(path))[1].get("model")
    return name if isinstance(name, str) else ""


def computed(routes: Routes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which rows were not cached, and which do not repeat another sequence's prompt, [rows]."""
    place = np.arange(len(routes.ids)) + (routes.start or 0)
    known = routes.start is not None
    cached = place < (routes.cached or 0) if known and not routes.again else place < 0
    again = place < (routes.prompt or 0) if known and routes.again else place < 0
    return ~cached, ~again


def chosen(ids: IntArray) -> NDArray[np.bool_]:
    """Whether a choice was made, bool [rows, layers].

    Experts of a choice differ, so that zeros are none. With one expert a token, zero may be a
    choice.
    """
    if ids.shape[2] == 1:
        return np.ones(ids.shape[:2], dtype=bool)
    return np.asarray((ids != ids[..., :1]).any(axis=2))


@dataclass
class _Survey:
    """What all responses say together, before their tokens are read.

    Attributes:
        shape: layers and top_k; used: bool [layers], whether anything was chosen there.
        rows: that are counted; made: int64 [layers], those of them with a choice.
    """

    shape: tuple[int, int] = (0, 0)
    used: NDArray[np.bool_] | None = None
    highest: int = 0
    rows: int = 0
    made: IntArray | None = None
    tallies: dict[str, int] = field(default_factory=dict)

    def add(self, routes: Routes) -> None:
        ids, shape = routes.ids, (routes.ids.shape[1], routes.ids.shape[2])
        if self.used is None:
            self.shape, self.used = shape, np.zeros(shape[0], dtype=bool)
        if shape != self.shape:
            raise UsageError(
                f"responses have {self.shape} and {shape} layers and experts a token: they are of "
                "different models, pass each model's apart"
            )
        fresh, own = computed(routes)
        made = chosen(ids)
        rows = fresh & own
        real = made[rows].any(axis=1)
        self.used |= (made & (ids != 0).any(axis=2)).any(axis=0)
        self.highest = max(self.highest, int(ids.max(initial=0)))
        self.rows += int(real.sum())
        counted = made[rows].sum(axis=0)
        self.made = counted if self.made is None else self.made + counted
        self._tally(CACHED, int((~fresh).sum()))
        self._tally(AGAIN, int((~own).sum()))
        self._tally(EMPTY, int((~real).sum()))
        with_prompt = routes.start is None or routes.prompt is None or routes.start < routes.prompt
        self._tally(CACHE, int(routes.cached is None and not routes.again and with_prompt))
        self._tally(UNPLACED, int(routes.start is None))

    def _tally(self, name: str, more: int) -> None:
        self.tallies[name] = self.tallies.get(name, 0) + more

    def notes(self) -> tuple[str, ...]:
        found = [name.format(number) for name, number in self.tallies.items() if number]
        if self.used is None or self.made is None:
            return (APART, *found)
        if partly := int((self.rows - self.made[self.used]).sum()):
            found.append(PARTLY.format(partly))
        if not self.used.all():
            found.append(DENSE.format(", ".join(map(str, np.flatnonzero(~self.used)))))
        return (APART, *found)


def _steps(found: Iterator[Routes], kept: list[int], experts: int) -> Iterator[Step]:
    """For each sequence its prefill and its decode."""
    for number, routes in enumerate(found):
        fresh, own = computed(routes)
        made = chosen(routes.ids)[:, kept]
        rows = np.flatnonzero(fresh & own & made.any(axis=1))
        ids = within(routes.ids[:, kept], min(experts, MOST_EXPERTS))
        ids = np.where(made[..., None], ids, -1)
        place = rows + (routes.start or 0)
        known = routes.start is not None and routes.prompt is not None
        prefill = place < (routes.prompt or 0)
        parts = {"prefill": prefill, "decode": ~prefill} if known else {"unknown": place >= 0}
        for phase, mine in parts.items():
            if mine.any():
                yield Step(
                    ids={layer: ids[rows[mine], at] for at, layer in enumerate(kept)},
                    phase=phase,
                    request=np.full(int(mine.sum()), number),
                    position=place[mine],
                )
