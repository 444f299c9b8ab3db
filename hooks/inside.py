"""The other end of ``routeprof attach``: runs in the process, on a thread of its own."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeprof.errors import AttachError, NoMoELayersError, RouteprofError
from routeprof.hooks.launch import ENGINES
from routeprof.hooks.roles import role_of

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from routeprof.capture.recorder import Recording

PAUSED = "start it again under routeprof run --paused, and then use routeprof start"


def attach(settings: dict[str, Any], tell: Callable[..., Any]) -> None:
    """Record the models of this process; never fail it.

    Args:
        settings: the fields of ``AttachSettings``.
        tell: hands an answer over; returns whether it was received.
    """
    try:
        recordings = record_all(settings)
    except RouteprofError as error:
        tell(error=str(error))
        return
    except ImportError as error:
        tell(missing=str(error), python=sys.executable)
        return
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        return
    heard = False
    with suppress(OSError):
        heard = tell(
            directories=[str(recording.directory) for recording in recordings],
            models=[(recording.info.model.name, hooked(recording)) for recording in recordings],
            messages=[message for recording in recordings for message in recording.messages],
        )
    if not heard:
        _stop(recordings)
    elif settings["duration"] is not None:
        timer = threading.Timer(settings["duration"], _stop, (recordings,))
        timer.daemon = True
        timer.start()


def hooked(recording: Recording) -> int:
    """How many layers are recorded."""
    layers = recording.info.layers
    return sum(layer.kind == "moe" and not layer.unsupported for layer in layers)


def _stop(recordings: Sequence[Recording]) -> None:
    for recording in recordings:
        recording.stop()


def record_all(settings: dict[str, Any]) -> list[Recording]:
    """Attach to each model and count from its next whole pass on.

    Raises:
        AttachError: there is no model, or none that can be hooked now.
        AlreadyAttachedError: a model is being recorded.
        RecordingExistsError: the directory holds something.
    """
    models = moe_models()
    from routeprof.hooks.transformers import record

    out = Path(settings["out"])
    recordings: list[Recording] = []
    try:
        for number, model in enumerate(models, start=1):
            recording = record(
                model,
                out if number == 1 else out.with_name(f"{out.name}.{number}"),
                level=settings["level"],
                gate=settings["gate"],
                window=settings["window"],
                role=role_of(model),
                paused=True,
            )
            recordings.append(recording)
            start_at_next_pass(model, recording)
    except BaseException:
        _stop(recordings)
        raise
    return recordings


def start_at_next_pass(model: nn.Module, recording: Recording) -> None:
    """Begin to count when a pass begins: of one that runs now, the begin was not seen."""
    recorder = recording._recorder
    handles: list[tuple[Any, RemovableHandle]] = []
    # What was asked for. The captures follow, unless somebody asks for something else meanwhile.
    recorder.writer.write_state(state="recording")

    def start(capture: Any) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            with suppress(Exception):
                for own, handle in list(handles):
                    if own is capture:
                        handle.remove()
                if recorder.writer.state.state == "recording":
                    capture.switch(True)

        return before

    for stream in recorder.streams:
        module = model.get_submodule(stream.name.rpartition("@")[0])
        handle = module.register_forward_pre_hook(start(stream.capture), prepend=True)
        handles.append((stream.capture, handle))

    def forget() -> None:
        for _, handle in handles:
            handle.remove()

    recorder.on_stop(forget)


# -- finding models


def moe_models() -> list[nn.Module]:
    """The outermost live modules with MoE layers.

    Raises:
        AttachError: there is none, or hooks would not run in it.
    """
    if "torch" not in sys.modules:
        raise AttachError("it has not loaded torch: name the process that runs the model")
    models = _search()
    if len(models) > 1:
        gc.collect()  # one may be garbage
        models = _search()
    if not models:
        engines = sorted(ENGINES & sys.modules.keys())
        if engines:
            raise AttachError(f"it runs {engines[0]}, which holds its kernels in graphs; {PAUSED}")
        raise AttachError("it holds no model with MoE layers; name the process that runs the model")
    for model in models:
        refuse_compiled(model)
    return models


def _search() -> list[nn.Module]:
    from torch import nn

    modules = _live(nn.Module)
    inner = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inner and _has_layers(module)]


def _live(kind: type) -> list[Any]:
    """All objects of a type, also those that gc.freeze took out of sight."""
    found = [item for item in gc.get_objects() if issubclass(type(item), kind)]
    if not found and gc.get_freeze_count():
        gc.unfreeze()
        found = [item for item in gc.get_objects() if issubclass(type(item), kind)]
        gc.freeze()
    return found


def _children(module: nn.Module) -> list[Any]:
    return list((vars(module).get("_modules") or {}).values())


def _has_layers(module: nn.Module) -> bool:
    from routeprof.hooks.discovery import find_layers
    from routeprof.hooks.launch import is_empty

    try:
        find_layers(module)
        types = {type(child).__module__.partition(".")[0] for child in module.modules()}
        return not types & ENGINES and not is_empty(module)
    except NoMoELayersError:
        return False
    except Exception:  # half made, or of a kind that nobody can look into
        return False


def refuse_compiled(model: nn.Module) -> None:
    """Hooks do not run in what was compiled or captured before.

    Raises:
        AttachError: this model was.
    """
    import torch

    from routeprof.hooks.compiled import has_graphs

    name = type(model).__name__
    if _live(torch.cuda.CUDAGraph):
        raise AttachError(f"it replays CUDA graphs, in which hooks do not run; {PAUSED}")
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    wrapped = any(
        type(module).__name__ == "OptimizedModule"
        or vars(module).get("_compiled_call_impl") is not None
        for module in model.modules()
    )
    if wrapped or has_graphs(model):
        raise AttachError(f"{name} is compiled, and hooks do not run in compiled code; {PAUSED}")
