"""How verbs are registered: one form of help for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

CONTEXT = {"help_option_names": ["-h", "--help"]}


class Verb(TyperCommand):
    """A command whose usage line names its arguments as they are written: ``SRC... DST``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Words of the usage line after the command's name."""
        pieces = ["[OPTIONS]"]
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                name = parameter.metavar or str(parameter.name).upper()
                pieces.append(name if parameter.required else f"[{name}]")
        return pieces


def add(
    app: typer.Typer, panel: str | None, *verbs: Callable[..., None], settings: Any = None
) -> None:
    """Register verbs under a heading of the list of verbs; settings: of click's context."""
    for verb in verbs:
        app.command(
            verb.__name__.replace("_", "-"),
            cls=Verb,
            help=described(verb.__doc__ or ""),
            rich_help_panel=panel,
            context_settings={**CONTEXT, **(settings or {})},
        )(verb)


def described(doc: str) -> str:
    """A docstring with each paragraph on one line, for the terminal to break."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
