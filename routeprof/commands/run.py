"""``routeprof run``: a program with its MoE models hooked from the start."""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Annotated

import typer

from routeprof.commands.options import Gate, Level, Out, Window, check_options
from routeprof.commands.program import hooked
from routeprof.errors import RecordingExistsError, UsageError
from routeprof.hooks.session import SETTINGS_VARIABLE


def run(
    out: Out,
    command: Annotated[
        list[str],
        typer.Argument(help="What to run, after --.", metavar="COMMAND...", show_default=False),
    ],
    level: Level = "windows",
    gate: Gate = True,
    window: Window = 1.0,
    paused: Annotated[
        bool, typer.Option("--paused", help="Attach, but count nothing until routeprof start.")
    ] = False,
    ranks: Annotated[str, typer.Option(help="Ranks to record, such as 0,2.")] = "all",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve Prometheus metrics while the program runs; 0 takes a free port.",
            metavar="PORT",
            rich_help_panel="Metrics",
            min=0,
            max=65535,
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(help="Address that the metrics are served at.", rich_help_panel="Metrics"),
    ] = "127.0.0.1",
    metrics_detailed: Annotated[
        bool,
        typer.Option(
            "--metrics-detailed",
            help="Also series of each layer and expert.",
            rich_help_panel="Metrics",
        ),
    ] = False,
) -> None:
    """Run a Python program and record every MoE model it serves or loads.

    COMMAND is python SCRIPT, python -m MODULE, torchrun …, vllm serve …, or any other script that
    Python runs. The program is not changed; its exit status and signals are its own. A second
    model is recorded beside the first, in OUT.2.

    Example: routeprof run -o runs/mixtral -- python generate.py --prompt hello

    Example: routeprof run -o runs/mixtral --metrics-port 9464 -- vllm serve Qwen/Qwen3-30B-A3B
    """
    check_options(level, window)
    program = hooked(command)
    if not program.shared and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordingExistsError(f"{out} is not empty; choose another directory for -o")
    settings = {
        "out": str(out.absolute()),
        "level": level,
        "gate": gate,
        "window": window,
        "paused": paused,
        "ranks": rank_list(ranks),
        "run": uuid.uuid4().hex,
    }
    if metrics_port is not None and is_first_here():
        from routeprof.commands.beside import serve_beside
        from routeprof.commands.extras import need

        need("prometheus_client", "metrics")
        where = serve_beside(out, metrics_host, metrics_port, detailed=metrics_detailed)
        print(f"routeprof: metrics at {where}", file=sys.stderr)
    environment = {**os.environ, SETTINGS_VARIABLE: json.dumps(settings)}
    sys.stdout.flush()
    os.execve(program.arguments[0], program.arguments, environment)


def is_first_here() -> bool:
    """Whether no other rank of a launcher that started this command stands before it on a node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def rank_list(text: str) -> list[int] | None:
    """Ranks by number; None for all.

    Raises:
        UsageError: the text is neither ``all`` nor numbers between commas.
    """
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"ranks {text!r} are not understood; write all, or numbers such as 0,2")
    return sorted({int(word) for word in words})
