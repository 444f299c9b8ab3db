"""What ``routeprof fold`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from routeprof.report.summary import plain, whole

_NAMED = 3
"""Lines of a kind that are printed; the JSON has all."""


def print_fold(found: dict[str, Any], console: Console) -> None:
    """Print what was added up.

    Args:
        found: see ``routeprof.commands.fold.folded``.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_row("parts", f"{whole(found['parts_read'])} of {whole(found['parts'])} read")
    for name in ("windows", "rows", "assignments"):
        grid.add_row(name, whole(found[name]))
    grid.add_row("seconds", f"{found['seconds']:.2f}")
    grid.add_row("rate", f"{whole(found['assignments_per_second'])} assignments/s")
    if found["equal"] is not None:
        grid.add_row(found["level"], _verdict(found))
    console.print(grid)
    wrong = [layer for layer in found["layers"] if layer.get("difference")]
    lines = [
        f"layer {layer['layer']}: windows {whole(layer['assignments'])}, {found['level']} "
        f"{whole(layer['recounted'])}; experts differ by {whole(layer['difference'])} in all"
        for layer in wrong
    ]
    for kind in (lines, found["gaps"], found["unread"]):
        for line in kind[:_NAMED]:
            console.print(plain(line), style="yellow", highlight=False, markup=False)
        if len(kind) > _NAMED:
            console.print(f"… and {len(kind) - _NAMED:,} more: --json", style="dim")


def _verdict(found: dict[str, Any]) -> str:
    layers = found["layers"]
    if found["equal"]:
        return f"equal to the windows in each expert of {len(layers)} layers"
    differing = sum(bool(layer.get("difference")) for layer in layers)
    why = ", as it may: see below" if found["gaps"] else ", and nothing is missing"
    return f"not what the windows say in {differing} of {len(layers)} layers{why}"
