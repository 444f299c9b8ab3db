"""Which programs ``routeprof run`` can start with hooks in them, and how."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from routeprof.errors import UsageError

LAUNCH = "routeprof.hooks.launch"
TORCHRUN = "torch.distributed.run"
OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take the next word."""

_PYTHON = re.compile(r"python\d*(\.\d+)*t?")
_LONG_PATH = re.compile(r"""'''exec' ("[^"]+"|\S+) """)
"""How pip writes an interpreter's path that is too long, or has spaces, for the first line."""


@dataclass(frozen=True)
class Program:
    """What to execute in place of a command.

    Attributes:
        arguments: the program's path first.
        shared: other launches, such as those of other nodes, may write to the same recording.
    """

    arguments: list[str]
    shared: bool = False


def hooked(command: list[str]) -> Program:
    """The command with the hooks in it.

    Raises:
        UsageError: the command is not one that can be hooked.
    """
    if not command:
        raise UsageError("nothing to run; name a command after --, such as: -- python script.py")
    program, words = shutil.which(command[0]), command[1:]
    if program is None:
        raise UsageError(f"{command[0]} is not a program; name a command after --")
    shared = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_python(program):
        options, rest = split_options(words)
        if not rest:
            raise UsageError("python needs a script, -m MODULE or -c CODE to run")
        interpreter, start = [program, *options], ["-m", TORCHRUN]
        if rest[:2] != start:
            return Program(_importing([*interpreter, "-m", LAUNCH, *rest]), shared)
        words = rest[2:]
    else:
        interpreter, start = shebang(Path(program)), [program]
        if not interpreter:
            raise UsageError(
                f"cannot hook {command[0]}: only Python programs are; run it as: -- python -m "
                "MODULE, or -- python SCRIPT, and put what wraps it before routeprof"
            )
        if Path(program).name != "torchrun":
            return Program(_importing([*interpreter, "-m", LAUNCH, program, *words]), shared)
    arguments, nodes = torchrun(words)
    return Program(_importing([*interpreter, *start, *arguments]), shared or nodes)


def is_python(program: str) -> bool:
    """Whether the program is a Python interpreter, by its name."""
    return bool(_PYTHON.fullmatch(Path(program).name))


def split_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter, and the rest: a script, ``-m`` or ``-c`` and what follows."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("-") or word in ("-", "-m", "-c"):
            break
        position += 2 if word in OPTIONS_WITH_VALUE else 1
    return arguments[:position], arguments[position:]


def shebang(script: Path) -> list[str]:
    """The interpreter that a script names, and its options; empty if it is not Python's."""
    try:
        with script.open("rb") as file:
            lines = file.read(1024).decode(errors="replace").splitlines()
    except OSError:
        return []
    if not lines or not lines[0].startswith("#!"):
        return []
    words = lines[0][2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
        words[:1] = [shutil.which(word) or word for word in words[:1]]
    elif len(lines) > 1 and (long_path := _LONG_PATH.match(lines[1])):
        words = [long_path[1].strip('"')]
    return words if words and is_python(words[0]) else []


def torchrun(words: list[str]) -> tuple[list[str], bool]:
    """torchrun's arguments with the hooks in every rank, and whether it spans several nodes.

    Raises:
        UsageError: torchrun would not take the arguments, or they leave no place for the hooks.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(words)
    for name in ("no_python", "run_path"):
        if getattr(parsed, name, False):
            option = name.replace("_", "-")
            raise UsageError(f"cannot hook torchrun --{option}; leave it out, and name a script")
    program = [parsed.training_script, *parsed.training_script_args]
    options = words[: len(words) - len(program)]
    if options[-1:] == ["--"]:
        del options[-1]
    module = [LAUNCH, "-m"] if parsed.module else ["-m", LAUNCH]
    return [*options, *module, *program], str(parsed.nnodes) not in ("1", "1:1")


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"torchrun: {message}; see torchrun --help")


def _importing(arguments: list[str]) -> list[str]:
    """The arguments, if the interpreter that they begin with has routeprof."""
    python = arguments[0]
    if python != sys.executable:
        check = [python, "-c", f"import {LAUNCH}"]
        if subprocess.run(check, capture_output=True, check=False).returncode:
            raise UsageError(f"{python} has no routeprof; run: {python} -m pip install routeprof")
    return arguments
