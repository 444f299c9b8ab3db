"""What the hooks of serving engines share: settings from outside, and a recording to count into."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from routeprof.topology import LEVELS, Layer, ModelInfo, RankRole

if TYPE_CHECKING:
    import torch

    from routeprof.capture.counters import RoutingCounters
    from routeprof.capture.engine import EngineCapture
    from routeprof.capture.recorder import Recording
    from routeprof.recording.schema import RecordingInfo

SETTINGS_VARIABLE = "ROUTEPROF_RUN"
PASS = "model"
"""Name of the one pass that an engine makes per step."""

STEP_RING = 1024
TOKEN_RING = 65_536


@dataclass(frozen=True)
class Settings:
    """What ``routeprof run`` asks of the hooks in every process that it starts.

    Attributes:
        out: directory of the recording, shared by all ranks.
        ranks: global ranks to record; None for all.
        run: the same in all processes of one run.
    """

    out: Path
    level: str = "windows"
    gate: bool = True
    window: float = 1.0
    paused: bool = False
    ranks: tuple[int, ...] | None = None
    run: str = ""


def settings() -> Settings | None:
    """What the environment asks for; None where this process was not started to be recorded."""
    text = os.environ.get(SETTINGS_VARIABLE)
    if not text:
        return None
    # A newer routeprof on the outside may ask for more than this one knows.
    known = {field.name for field in fields(Settings)}
    data = {name: value for name, value in json.loads(text).items() if name in known}
    data["out"] = Path(data["out"])
    if data.get("ranks") is not None:
        data["ranks"] = tuple(data["ranks"])
    return Settings(**data)


@dataclass
class Session:
    """One engine process that is being recorded.

    Attributes:
        capture: None where no layer can be tapped.
        positions: for the index of each tapped layer, its position in the capture.
    """

    settings: Settings
    recording: Recording
    capture: EngineCapture | None
    positions: dict[int, int]


def wants(settings: Settings, rank: int) -> bool:
    """Whether this rank is to be recorded."""
    return settings.ranks is None or rank in settings.ranks


def open_session(
    settings: Settings,
    layers: Sequence[Layer],
    model: ModelInfo,
    role: RankRole,
    device: torch.device,
    *,
    expects: bool = True,
    stages: int = 1,
) -> Session:
    """Begin a recording for this process.

    Args:
        layers: all layers of the model that this process holds; those that cannot be tapped say
            why in ``unsupported``.

    Raises:
        RecordingExistsError: the directory holds something already.
    """
    import torch

    from routeprof.capture.engine import EngineCapture
    from routeprof.capture.recorder import Recorder, Recording

    info = _info(settings, layers, model)
    tapped = [layer for layer in layers if layer.kind == "moe" and not layer.unsupported]
    capture = None
    if tapped:
        with torch.inference_mode(False):
            capture = EngineCapture(_counters(tapped, settings, device), expects=expects)
    captures = {} if capture is None else {f"{PASS}@{device}": capture}
    recorder = Recorder(
        settings.out, captures, info, role, paused=settings.paused, own_layers=stages > 1
    )
    unsupported = [layer for layer in layers if layer.unsupported]
    messages = [f"layer {layer.name} is not recorded: {layer.unsupported}" for layer in unsupported]
    recording = Recording(recorder, _nothing_to_remove, messages)
    positions = {layer.index: place for place, layer in enumerate(tapped)}
    return Session(settings, recording, capture, positions)


def _nothing_to_remove() -> None:
    """Taps stay in the engine's graphs; outside a recorded step they count nothing."""


def _info(settings: Settings, layers: Sequence[Layer], model: ModelInfo) -> RecordingInfo:
    from routeprof import __version__
    from routeprof.capture.layout import DEFAULT_CAPACITY_FACTORS
    from routeprof.recording.schema import RecordingInfo

    return RecordingInfo(
        id=uuid.uuid4().hex,
        layers=tuple(layers),
        passes=tuple(PASS if layer.kind == "moe" else "" for layer in layers),
        model=model,
        level=settings.level,
        gate=settings.gate,
        window_seconds=settings.window,
        capacity_factors=DEFAULT_CAPACITY_FACTORS,
        started=time(),
        routeprof=__version__,
        run=settings.run,
    )


def _counters(tapped: Sequence[Layer], settings: Settings, device: torch.device) -> RoutingCounters:
    from routeprof.capture.counters import RoutingCounters
    from routeprof.capture.layout import Layout
    from routeprof.capture.rings import StepRing, TokenRing

    layout = Layout(tuple(tapped))
    level = LEVELS.index(settings.level)
    return RoutingCounters(
        layout,
        device,
        gate=settings.gate,
        step_ring=StepRing(layout, device, STEP_RING) if level >= 1 else None,
        token_ring=TokenRing(layout, device, TOKEN_RING) if level >= 2 else None,
    )


def say(text: str) -> None:
    """One line for whoever watches the engine's log."""
    print(f"routeprof: {text}", file=sys.stderr, flush=True)
