"""What recording costs a vLLM engine, as ratios of one run: ``python -m tests.vllm.bench``.

Engines with and without routeprof take turns, so that a slow minute hits both; each is a process
of its own, warms up, and serves a few rounds of each load. The first ratio is honest and noisy:
throughput with routeprof ÷ throughput of an engine without it, of medians of rounds. The second
is of neighbouring rounds in the same engine: counting ÷ paused, with the taps in the graph both
times. Absolute times are printed only to say what the ratios are of.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

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
    "counts only": {"level": "windows", "gate": False},
    "counts and gate": {"level": "windows", "gate": True},
    "level tokens": {"level": "tokens", "gate": True},
}
SHAPE = "12 layers, 64 experts, top-8, hidden 256"

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


def tables(found: dict[str, list[Times]]) -> Iterator[str]:
    """The ratios as Markdown."""
    plain = found["without routeprof"]
    yield "| load | level | ÷ without routeprof | counting ÷ paused |"
    yield "|---|---|---|---|"
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
            yield f"| {load} | {name} | {_spread(honest)} | {_spread(tight)} |"


def _middle(times: dict[str, list[float]]) -> float:
    return statistics.median(times["counting"])


def _states(times: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return times["paused"], times["counting"]


def _spread(ratios: list[float]) -> str:
    """Median, and the middle half, or all of what is too few for quartiles."""
    low, high = min(ratios), max(ratios)
    if len(ratios) > 3:
        low, _, high = statistics.quantiles(ratios, n=4)
    return f"× {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def report(found: dict[str, list[Times]], *, eager: bool) -> None:
    """Print what was measured."""
    mode = "eager" if eager else "compiled"
    print(f"\nvLLM on {platform.machine()}, {mode}; Qwen3-MoE of {SHAPE}; throughput ratios,")
    print("median and spread:\n")
    print("\n".join(tables(found)))
    for load, scene in LOADS.items():
        tokens = sum(len(prompt) + scene["new"] - 1 for prompt in scene["prompts"])
        seconds = statistics.median(_middle(turn[load]) for turn in found["without routeprof"])
        print(f"\n{load}: {tokens} tokens a round, {tokens / seconds:.0f} a second without it")


def main() -> None:
    """Measure, or be the engine that is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--turns", type=int, default=2, help="engines of each kind")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each load and state")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--recording", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        rounds, eager = arguments.rounds, arguments.eager
        times = serve(arguments.serve, arguments.recording, rounds, eager=eager)
        Path(arguments.result).write_text(json.dumps(times))
    else:
        report(measure(arguments), eager=arguments.eager)


if __name__ == "__main__":
    main()
