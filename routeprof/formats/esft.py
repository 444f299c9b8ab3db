"""ESFT's records of experts: ``expert_weights_<layer>.txt``, one sequence a line.

As ``deepseek-ai/ESFT`` writes them: the ids of all tokens, token after token, separated by tabs,
an empty field, then their gate weights. How many belong to a token is not in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.expert_ids import UNSEEN, layers_of, within
from routeprof.formats.source import Source, Step, Told
from routeprof.metrics._arrays import IntArray

NAME = re.compile(r"expert_weights_(\d{1,4})\.txt")
NOTE = "each line is a sequence: which of them ran together, and in which phase, is not known"


def is_esft(path: Path) -> bool:
    """A file of that name that begins with numbers and tabs."""
    if not NAME.fullmatch(path.name) or not path.is_file():
        return False
    with path.open("rb") as file:
        return re.match(rb"\d+\t\d+\t", file.read(64)) is not None


def read_esft(paths: Sequence[Path], told: Told) -> Source:
    """Tokens of sequences, in the layers that files are of.

    Raises:
        UsageError: top_k was not told, or is not the file's; files of different sequences.
    """
    if told.top_k is None:
        raise UsageError(
            f"{paths[0]} does not say how many experts a token has: convert it with --top-k"
        )
    found = {_layer(path): list(_sequences(path, told.top_k)) for path in paths}
    lengths = {tuple(len(ids) for ids in own) for own in found.values()}
    if len(found) < len(paths) or len(lengths) != 1 or not lengths.copy().pop():
        raise UsageError(
            f"{paths[0]} and others hold no sequences, or not the same ones in layers of their "
            "own: pass files of one run"
        )
    experts = told.experts or 1 + max(int(ids.max()) for own in found.values() for ids in own)
    layers = layers_of(
        paths[0], dict.fromkeys(found, told.top_k), experts, lambda index: f"layer {index}"
    )
    steps = [
        Step(
            ids={index: within(own[number], experts) for index, own in found.items()},
            request=np.full(length, number),
            position=np.arange(length),
        )
        for number, length in enumerate(lengths.pop())
    ]
    notes = (NOTE,) if told.experts else (NOTE, UNSEEN)
    return Source("esft", layers, steps, "tokens", notes=notes, batches=False)


def _layer(path: Path) -> int:
    name = NAME.fullmatch(path.name)
    if name is None:
        raise UsageError(f"{path} is not named expert_weights_<layer>.txt: name its layer so")
    return int(name[1])


def _sequences(path: Path, top_k: int) -> Iterator[IntArray]:
    """Ids of each line, int64 [tokens, top_k]."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            ids, _, weights = line.rstrip("\r\n").partition("\t\t")
            try:
                flat = np.array(ids.split("\t"), dtype=np.int64)
                rows = np.sort(flat.reshape(-1, top_k), axis=1)
            except (ValueError, OverflowError):
                raise UsageError(
                    f"{path}, line {number} holds no {top_k} experts for each token: pass the "
                    "model's --top-k"
                ) from None
            if weights and weights.count("\t") + 1 != flat.size:
                raise UsageError(f"{path}, line {number} has not as many weights as ids: mend it")
            if (rows[:, 1:] == rows[:, :-1]).any():
                raise UsageError(
                    f"{path}, line {number} would have tokens that choose an expert twice: pass "
                    "the model's --top-k"
                )
            yield flat.reshape(-1, top_k)
