"""How good and how fast expert placement is: ``python -m tests.bench placement``.

Loads are fitted on the first half of their steps and judged on the second, by ours and by EPLB:
the slowest rank's load over the mean rank's (of added up loads), and over all steps (stragglers).
Where ``--eplb FILE`` names DeepSeek's own ``eplb.py``, which isn't part of this project, it is
timed too, and its placements must be as slow as those of EPLB rewritten here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any

import numpy as np
import torch

from routeprof.whatif.cluster import Cluster
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.judge import judge
from routeprof.whatif.placement import Effort, place
from tests.bench import expert_parallel
from tests.bench.kept import Figure, figure
from tests.realdata import REALDATA
from tests.whatif.corpus import Case, case

SIZES = ((256, 8), (256, 32), (288, 32), (288, 72), (320, 64))


def real(path: Path, name: str) -> Iterator[Case]:
    """A model's measured load: the sums, and steps drawn from them."""
    loads = np.array(json.loads(path.read_text())["logical_count"])[3:]
    for slots, gpus in SIZES:
        yield Case(f"{name} {slots} on {gpus}, sums", loads[None], loads[None], gpus, slots)
    random = np.random.default_rng(0)
    shares = loads / loads.sum(axis=1, keepdims=True)
    for slots, gpus in SIZES:
        steps = random.poisson(shares * 32_768, (128, *loads.shape)).astype(np.float64)
        yield Case(f"{name} {slots} on {gpus}, 64 steps", steps[:64], steps[64:], gpus, slots)


def measured() -> Iterator[Case]:
    if not REALDATA.is_dir():
        print("recordings of real models (../shared/realdata) are not on this machine")
        return
    folder = REALDATA / "sglang-dsv3"
    yield from real(folder / "decode_in2000out100.json", "dsv3 decode")
    yield from real(folder / "prefill_in2048.json", "dsv3 prefill")


def compared(
    one: Case, effort: Effort, repeats: bool, original: ModuleType | None
) -> tuple[np.ndarray, list[Figure]]:
    """Our held-out figures over EPLB's, and the row of the table."""
    cluster, total = Cluster.even(one.gpus, one.slots), one.fit.sum(axis=0)
    start = process_time()
    eplb = rebalance_experts(total, one.slots, 1, 1, one.gpus)[0]
    eplb_time = process_time() - start
    original_time = timed_original(original, total, one, eplb, cluster)
    start = process_time()
    placement = place(one.fit, cluster, effort=effort, repeats=repeats)
    our_time = process_time() - start
    figures = [
        [np.mean(found.slowest_over_mean), np.mean(found.straggler_factor)]
        for slots in (eplb, placement.slots)
        for found in (judge(slots, one.fit, cluster), judge(slots, one.held_out, cluster))
    ]
    mean = one.fit.sum(axis=2).mean(axis=0) / one.gpus
    bound = float(np.mean(placement.bound / mean))
    times = {"EPLB s": eplb_time, "original s": original_time, "ours s": our_time}
    return np.array(figures[3]) / figures[1], list(_row(one.name, figures, bound, times))


def _row(
    name: str, figures: list[list[float]], bound: float, times: dict[str, float]
) -> Iterator[Figure]:
    steps = not name.endswith("sums")
    for who, better, (fitted, held_out) in (
        ("EPLB", "", figures[:2]),
        ("ours", "lower", figures[2:]),
    ):
        options: dict[str, Any] = {"better": better, "digits": 4, "exact": True}
        yield figure("placements", name, f"{who} fitted", float(fitted[0]), **options)
        if steps:
            yield figure("placements", name, f"{who} held out", float(held_out[0]), **options)
            options["digits"] = 3
            yield figure("placements", name, f"{who} by step", float(held_out[1]), **options)
    yield figure("placements", name, "bound", bound, digits=4, exact=True)
    for column, seconds in times.items():
        if not np.isnan(seconds):
            yield figure("placements", name, column, seconds, unit="s", digits=2)
    base = times["original s"]
    if not np.isnan(base):
        ratio = times["ours s"] / base
        yield figure("placements", name, "ratio", ratio, digits=2, better="lower", target=2.0)


def timed_original(
    original: ModuleType | None, total: np.ndarray, one: Case, eplb: np.ndarray, cluster: Cluster
) -> float:
    if original is None:
        return float("nan")
    weight = torch.tensor(total)
    start = process_time()
    slots = original.rebalance_experts(weight, one.slots, 1, 1, one.gpus)[0].numpy()
    seconds = process_time() - start
    # It sorts equal loads in any order, so slots may differ.
    theirs, ours = (judge(found, total, cluster).slowest for found in (slots, eplb))
    if not np.allclose(theirs, ours, rtol=0.05):
        print(f"{one.name}: EPLB rewritten differs from its original")
    return seconds


def loaded(path: Path | None) -> ModuleType | None:
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("original_eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """The suite's name, how it was measured, and its figures."""
    parser = argparse.ArgumentParser(prog="make bench-placement", description=__doc__)
    parser.add_argument("--eplb", type=Path, help="DeepSeek's eplb.py, to be timed")
    parser.add_argument("--effort", choices=["low", "normal", "high"], default="normal")
    parser.add_argument("--strict", action="store_true", help="no GPU holds an expert twice")
    parser.add_argument("--cases", type=int, default=48, help="number of made up problems")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    original = loaded(options.eplb)
    effort, repeats = options.effort, not options.strict
    figures: list[Figure] = []
    kinds = (("measured", measured()), ("made up", map(case, range(options.cases))))
    for kind, cases in kinds:
        found = [compared(one, effort, repeats, original) for one in cases]
        if found:
            figures += summary(f"{len(found)} {kind}", np.array([ratios for ratios, _ in found]))
            figures += [one for _, row in found if kind == "measured" for one in row]
    figures += expert_parallel.measure()
    yield "placement", f'One thread, `effort="{effort}"`, once; seconds are CPU time.', figures


def summary(kind: str, ratios: np.ndarray) -> Iterator[Figure]:
    """Ours ÷ EPLB on held-out steps: summed, and by step."""
    options: dict[str, Any] = {"better": "lower", "digits": 4, "exact": True}
    for column, values in zip(("summed", "by step"), ratios.T, strict=True):
        mean = float(np.exp(np.log(values).mean()))
        yield figure("held out", f"{kind}, geometric mean", column, mean, **options)
        largest = float(values.max())
        yield figure("held out", f"{kind}, largest", column, largest, **options, target=1.001)
