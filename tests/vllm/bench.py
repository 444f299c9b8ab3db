"""What recording costs a vLLM engine, as ratios of one run: ``python -m tests.vllm.bench``.

Engines with and without routeprof take turns, so that a slow minute hits both; each is a process
of its own, warms up, and serves a few rounds of each load. The first ratio is honest and noisy:
throughput with routeprof ÷ throughput of an engine without it, of medians of rounds. The second
is of neighbouring rounds in the same engine: counting ÷ paused, with the taps in the graph both
times. Absolute times are kept only to say what the ratios are of.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from tests.bench.__main__ import keep
from tests.bench.kept import RESULTS, Figure, Machine, Result, figure
from tests.bench.page import PAGE, page
from tests.vllm.conftest import ROOT, Engines, prompts
from tests.vllm.drive import ENGINE, play
from tests.vllm.models import write

BATCH = 16
LOADS = {
    "decode": {"prompts": prompts(*[8] * BATCH), "new": 33},
    "prefill": {"prompts": prompts(*[240] * BATCH, seed=1), "new": 1},
}
LEVELS: dict[str, dict[str, Any] | None] = {
    "without routeprof": None,
    "windows, counts only": {"level": "windows", "gate": False},
    "windows, counts and gate": {"level": "windows", "gate": True},
    "tokens, counts and gate": {"level": "tokens", "gate": True},
}

Times = dict[str, dict[str, list[float]]]
"""For each load the seconds of each round: ``counting``, and ``paused`` where there is a switch."""


# -- in the engine's process


def serve(model: str, recording: str, rounds: int, *, eager: bool) -> Times:
    """Time the loads; with a recording, every other round paused."""
    from vllm import LLM

    options = {"enforce_eager": eager, "enable_prefix_caching": False}
    engine = LLM(**ENGINE | options, model=model)
    return {name: _rounds(engine, load, recording, rounds) for name, load in LOADS.items()}


def _rounds(
    engine: Any, load: dict[str, Any], recording: str, rounds: int
) -> dict[str, list[float]]:
    play(engine, load)
    times: dict[str, list[float]] = {"counting": [], "paused": []}
    for _ in range(rounds):
        for state in ("paused", "counting") if recording else ("counting",):
            if recording:
                _switch(Path(recording), "paused" if state == "paused" else "recording")
            times[state].append(play(engine, load)["seconds"])
    return times


def _switch(recording: Path, want: Any) -> None:
    from routeprof.capture.control import answered, request, wait_for

    number = request(recording, want)
    assert all(answered(state, number) for state in wait_for(recording, number).values())


# -- in this one


def measure(arguments: argparse.Namespace) -> dict[str, list[Times]]:
    """All times by level, one entry for each turn."""
    with tempfile.TemporaryDirectory(prefix="routeprof-bench-") as temporary:
        folder = Path(temporary)
        write(folder / "models" / "bench", "bench")
        engines = Engines(folder)
        found: dict[str, list[Times]] = {name: [] for name in LEVELS}
        for turn in range(arguments.turns):
            for name, record in LEVELS.items():
                start = monotonic()
                found[name].append(_engine(engines, folder, record, arguments))
                took = monotonic() - start
                print(f"turn {turn + 1}, {name}: {took:.0f} s", file=sys.stderr)
        return found


def _engine(
    engines: Engines, folder: Path, record: dict[str, Any] | None, arguments: argparse.Namespace
) -> Times:
    engines.started += 1
    out, result = (folder / f"{kind}-{engines.started}" for kind in ("recording", "result"))
    # As users have it: the worker on a core of its own, beside the engine's other processes.
    environment = engines.environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    if record is not None:
        environment["ROUTEPROF_RUN"] = json.dumps({"out": str(out), **record})
    command = [sys.executable, "-m", "tests.vllm.bench", "--serve", str(folder / "models/bench")]
    command += ["--recording", "" if record is None else str(out), "--result", str(result)]
    command += ["--rounds", str(arguments.rounds)] + ["--eager"] * arguments.eager
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the engine failed:\n{done.stderr[-6000:]}")
    return json.loads(result.read_text())


COLUMNS = {
    "decode": f"decode, {BATCH} sequences",
    "prefill": f"prefill, {BATCH} × 240 tokens",
}


def figures(found: dict[str, list[Times]]) -> Iterator[Figure]:
    """The ratios, and what they are ratios of."""
    plain = found["without routeprof"]
    for load in LOADS:
        for name, turns in found.items():
            if turns is plain:
                continue
            pairs = zip(plain, turns, strict=True)
            honest = [_middle(off[load]) / _middle(on[load]) for off, on in pairs]
            tight = [
                paused / counting
                for turn in turns
                for paused, counting in zip(*_states(turn[load]), strict=True)
            ]
            row = f"{COLUMNS[load]}: {name}"
            target = 0.98 if name == "windows, counts only" else None
            options: dict[str, Any] = {"better": "higher"}
            yield figure("vllm", row, "÷ without routeprof", honest, **options)
            yield figure("vllm", row, "counting ÷ paused", tight, **options, target=target)
    for load, scene in LOADS.items():
        steps, kind = (1, "round") if scene["new"] == 1 else (scene["new"], "step")
        times = [1e3 * s / steps for turn in plain for s in turn[load]["counting"]]
        yield figure("round", f"without routeprof, a {kind}", load, times, unit="ms", digits=0)


def _middle(times: dict[str, list[float]]) -> float:
    return statistics.median(times["counting"])


def _states(times: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return times["paused"], times["counting"]


def main() -> None:
    """Measure, or be the engine that is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--turns", type=int, default=2, help="engines of each kind")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each load and state")
    parser.add_argument("--replace", action="store_true", help="keep the figures in any case")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--recording", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        rounds, eager = arguments.rounds, arguments.eager
        times = serve(arguments.serve, arguments.recording, rounds, eager=eager)
        Path(arguments.result).write_text(json.dumps(times))
    else:
        machine, mode = Machine.here(), "eager" if arguments.eager else "default compiled"
        method = (
            f"vLLM {version('vllm')} on the CPU, {mode} mode; {arguments.turns} engines of each "
            f"kind in turns, {arguments.rounds} rounds of each load in each."
        )
        found = tuple(figures(measure(arguments)))
        date = datetime.now(UTC).date().isoformat()
        keep(Result("vllm", date, method, machine, found), RESULTS, replace=arguments.replace)
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
