"""How fast recordings are added up: ``python -m tests.bench fold``.

Token ids are counted from a recording's parts, by numpy.bincount from an array in memory, and by a
pandas group-by from a frame in memory, in turns in one process. Windows are folded likewise,
against adding the same counts up as one array.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from routeprof.recording.fold import fold
from routeprof.recording.reader import open_recording
from routeprof.recording.recount import count_tokens
from routeprof.recording.schema import TOKEN_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, RankRole
from tests.bench import window_parts
from tests.bench.kept import Figure, figure

LAYERS, EXPERTS, TOP_K, ROWS = 8, 256, 8, 16
"""Of the recording of tokens: ROWS layer calls a part and layer."""


def write_tokens(directory: Path, assignments: int, part: int) -> np.ndarray:
    """A recording at level tokens by the real writer: its ids, [assignments], layer after layer.

    Args:
        assignments: in all; a multiple of ``part``.
        part: assignments in a part.
    """
    layers = tuple(Layer(n, f"layers.{n}.mlp", experts=EXPERTS, top_k=TOP_K) for n in range(LAYERS))
    info = RecordingInfo("bench", layers, ("model",) * LAYERS, level="tokens")
    writer = RecordingWriter(directory, info, RankState(role=RankRole()))
    random, share = np.random.default_rng(0), random_shares(EXPERTS)
    tokens = part // LAYERS // ROWS // TOP_K
    everything = []
    for number in range(assignments // part):
        ids = random.choice(EXPERTS, p=share, size=(LAYERS, ROWS, tokens * TOP_K)).astype(np.uint8)
        count = LAYERS * ROWS
        rows = {
            "step": np.tile(np.arange(ROWS), LAYERS) + number * ROWS,
            "rank": [0] * count,
            "layer": np.repeat(np.arange(LAYERS), ROWS),
            "tokens": [tokens] * count,
            "phase": ["decode"] * count,
            "ids": [own.tobytes() for own in ids.reshape(count, -1)],
        }
        writer.write("tokens", TOKEN_SCHEMA, rows)
        everything.append(ids.reshape(LAYERS, -1))
    writer.write_state(state="stopped")
    return np.concatenate(everything, axis=1)


def random_shares(experts: int) -> np.ndarray:
    """A skewed load: shares of a gamma distribution of shape 2."""
    load = np.random.default_rng(1).gamma(2.0, size=experts)
    return load / load.sum()


def rates(
    ways: dict[str, Callable[[], np.ndarray]], assignments: int, rounds: int
) -> dict[str, list[float]]:
    """Assignments a second of processor time, of each way in turns; all must agree."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        counts = {}
        for name, way in ways.items():
            start = process_time()
            counts[name] = way()
            found[name].append(assignments / (process_time() - start))
        first = next(iter(counts.values()))
        assert all(np.array_equal(first, other) for other in counts.values())
    return found


def table(name: str, found: dict[str, list[float]]) -> Iterator[Figure]:
    """Rates in millions a second, and ours ÷ each of the others."""
    ours = next(iter(found.values()))
    for way, values in found.items():
        millions = [value / 1e6 for value in values]
        column = "million assignments a second"
        yield figure(name, way, column, millions, unit="M/s", digits=0, better="higher")
        if values is not ours:
            ratios = [own / other for own, other in zip(ours, values, strict=True)]
            target = 0.5 if way == "numpy.bincount" else None
            options = {"digits": 2, "better": "higher", "target": target}
            yield figure(name, way, "routeprof ÷ this", ratios, **options)


def of_tokens(folder: Path, assignments: int, rounds: int) -> Iterator[Figure]:
    """The recording's ids, against the same ids in memory."""
    ids = write_tokens(folder / "tokens", assignments, min(assignments, 4 << 20))
    files = open_recording(folder / "tokens")
    parts = files.parts("tokens")
    layer = np.repeat(np.arange(LAYERS, dtype=np.uint8), ids.shape[1])
    frame = pd.DataFrame({"layer": layer, "expert": ids.reshape(-1)})

    def pandas() -> np.ndarray:
        return frame.groupby(["layer", "expert"]).size().to_numpy().reshape(LAYERS, EXPERTS)

    ways = {
        "routeprof, from the parts": lambda: count_tokens(parts, files.info).counts,
        "numpy.bincount": lambda: np.stack([np.bincount(own, minlength=EXPERTS) for own in ids]),
        "pandas group-by": pandas,
    }
    yield from table("tokens", rates(ways, ids.size, rounds))
    size = sum(part.path.stat().st_size for part in parts)
    yield figure(
        "tokens",
        "routeprof, from the parts",
        "bytes an id",
        size / ids.size,
        unit="B",
        better="lower",
    )


def of_windows(folder: Path, ranks: int, rounds: int) -> Iterator[Figure]:
    """All columns of windows, against reading the counts alone and adding them up."""
    window_parts.write(folder / "windows", ranks=ranks, windows=60, parts=60)
    files = open_recording(folder / "windows")
    parts = files.parts("part")

    def bare() -> np.ndarray:
        total = np.zeros((len(files.info.layers), 256), dtype=np.int64)
        for part in parts:
            lists = pq.read_table(part.path, columns=["counts"])["counts"].combine_chunks()
            total += lists.flatten().to_numpy().reshape(-1, *total.shape).sum(axis=0)
        return total

    ways = {
        "routeprof, all columns": lambda: fold(parts, files.info).lists["counts"].sum(0),
        "pyarrow and numpy, counts alone": bare,
    }
    rows = ranks * 60 * len(files.info.layers)
    for way, values in rates(ways, rows, rounds).items():
        thousands = [value / 1e3 for value in values]
        options = {"unit": "k/s", "digits": 0, "better": "higher"}
        yield figure("windows", way, "thousand rows a second", thousands, **options)


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """Each suite's name, how it was measured, and its figures."""
    parser = argparse.ArgumentParser(prog="make bench ARGS='fold …'", description=__doc__)
    parser.add_argument("--assignments", type=int, default=1 << 26, help="a multiple of 2^22")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="routeprof-bench-") as temporary:
        folder = Path(temporary)
        size, ranks, rounds = chosen.assignments, chosen.ranks, chosen.rounds
        method = f"{size:,} assignments of {LAYERS} layers, {EXPERTS} experts; {rounds} rounds."
        yield "fold", method, list(of_tokens(folder, size, rounds))
        method = (
            f"{ranks} ranks × 60 windows of a part each × 58 layers × 256 experts; {rounds} rounds."
        )
        yield "windows", method, list(of_windows(folder, ranks, rounds))
