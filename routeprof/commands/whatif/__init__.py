"""``routeprof whatif``: predict from a recording before anything is changed."""

from __future__ import annotations

import typer

from routeprof.commands.verbs import CONTEXT, add
from routeprof.commands.whatif.batching import batching
from routeprof.commands.whatif.capacity import capacity
from routeprof.commands.whatif.layout import layout
from routeprof.commands.whatif.placement import placement

app = typer.Typer(
    help="Predict from a recording what a change would bring.",
    no_args_is_help=True,
    context_settings=CONTEXT,
)
add(app, None, capacity, placement, layout, batching)
