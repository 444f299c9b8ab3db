"""``routeprof run``: a program with its MoE models hooked from the start."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from routeprof.errors import RecordingExistsError, UsageError
from routeprof.hooks.launch import SETTINGS_VARIABLE

PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def run(
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Where the recording goes.", show_default=False)
    ],
    command: Annotated[
        list[str], typer.Argument(help="What to run, after --.", show_default=False)
    ],
    level: Annotated[str, typer.Option(help="windows, steps or tokens.")] = "windows",
    gate: Annotated[bool, typer.Option(help="Keep the router's outputs too.")] = True,
    window: Annotated[float, typer.Option(help="Seconds that a window lasts.")] = 1.0,
    paused: Annotated[
        bool, typer.Option("--paused", help="Attach, but count nothing yet.")
    ] = False,
) -> None:
    """Run a Python program and record every MoE model it loads through transformers.

    The program is not changed; its exit status and signals are its own. A second model is
    recorded beside the first, in OUT.2.

    Example: routeprof run -o runs/mixtral -- python generate.py --prompt hello
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordingExistsError(f"{out} is not empty; choose another directory for -o")
    settings = {"out": str(out.absolute()), "level": level, "gate": gate, "window": window}
    launch(command, settings | {"paused": paused})


def launch(command: list[str], settings: dict[str, object]) -> None:
    """Replace this process by the command, hooked.

    Raises:
        UsageError: the command is not one that can be hooked.
    """
    if not command:
        raise UsageError("nothing to run; name a command after --, such as: -- python script.py")
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]} is not a program; name a command after --")
    if not is_python(program):
        raise UsageError(
            f"cannot hook {command[0]}: only Python programs are; "
            "run it as: -- python -m MODULE, or -- python SCRIPT"
        )
    options, rest = split_options(command[1:])
    if not rest:
        raise UsageError("python needs a script, -m MODULE or -c CODE to run")
    hooked = [program, *options, "-m", "routeprof.hooks.launch", *rest]
    environment = {**os.environ, SETTINGS_VARIABLE: json.dumps(settings)}
    sys.stdout.flush()
    os.execve(program, hooked, environment)


def is_python(program: str) -> bool:
    """Whether the program is a Python interpreter, by its name."""
    return Path(program).name.startswith("python")


def split_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter, and the rest: a script, ``-m`` or ``-c`` and what follows."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("-") or word in ("-", "-m", "-c"):
            break
        position += 2 if word in PYTHON_OPTIONS_WITH_VALUE else 1
    return arguments[:position], arguments[position:]
