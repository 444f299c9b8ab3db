"""``python -m routeprof.hooks.launch``: a program whose MoE models are recorded.

``routeprof run`` starts it in place of the program's own interpreter call. It waits for
transformers to be imported, and attaches to every model with MoE layers that the program makes.
What a serving engine makes is left to the plugins, which find the same settings in the environment
of each of its processes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from routeprof.hooks.roles import rank_here, role_of, world_size
from routeprof.hooks.session import SETTINGS_VARIABLE, Settings, settings, wants

if TYPE_CHECKING:
    from routeprof.capture.recorder import Recording

MODELS = "transformers.modeling_utils"
ENGINES = {"vllm", "sglang"}
"""Serving engines that have a plugin of their own."""


class Attacher:
    """Records every finished model, each into a directory of its own."""

    def __init__(self, wanted: Settings) -> None:
        self.wanted = wanted
        self.recordings: list[Recording] = []
        self._making = threading.local()
        self._pid = os.getpid()
        atexit.register(self.finish)

    def whole(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what makes a model: the outermost call that ends has made all of it."""

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(self._making, "depth", 0)
            self._making.depth = depth + 1
            try:
                result = make(*args, **kwargs)
            finally:
                self._making.depth = depth
            if depth == 0:
                self.attach(args[0] if make.__name__ == "__init__" else result)
            return result

        return made

    def attach(self, result: Any) -> None:
        """Record the model, if it has MoE layers; never fail the program."""
        from torch import nn

        from routeprof.errors import AlreadyAttachedError, NoMoELayersError

        model = result[0] if isinstance(result, tuple) else result
        if not isinstance(model, nn.Module) or is_empty(model) or _inside_engine():
            return
        try:
            recording = self._record(model)
        except (NoMoELayersError, AlreadyAttachedError):
            return
        except Exception as error:
            _say(f"could not attach to {type(model).__name__}: {error}")
            return
        self.recordings.append(recording)
        for message in recording.messages:
            _say(message)

    def _record(self, model: Any) -> Recording:
        """Record into the directory that was asked for, or beside it, in the first free one."""
        from routeprof.errors import RecordingExistsError
        from routeprof.hooks.transformers import record

        wanted = self.wanted
        for number in count(1):
            out = wanted.out if number == 1 else wanted.out.with_name(f"{wanted.out.name}.{number}")
            with contextlib.suppress(RecordingExistsError):
                return record(
                    model,
                    out,
                    level=wanted.level,
                    gate=wanted.gate,
                    window=wanted.window,
                    paused=wanted.paused,
                    role=role_of(model),
                )
        raise AssertionError

    def finish(self) -> None:
        """Write what is left when the program ends."""
        if os.getpid() != self._pid:
            return  # a forked child, which recorded nothing
        for recording in self.recordings:
            recording.stop()
            _say(f"recorded {recording.info.model.name} in {recording.directory}")
        if not self.recordings and not ENGINES & sys.modules.keys():
            _say("no MoE model was made through transformers: nothing was recorded")


def _inside_engine() -> bool:
    """Whether a serving engine is making the model: its plugin records that better."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ENGINES:
            return True
        frame = frame.f_back
    return False


def is_empty(model: Any) -> bool:
    """Whether all of it is on the meta device: a plan of a model, not one that can run."""
    parameters = list(model.parameters())
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not hooked and all(parameter.device.type == "meta" for parameter in parameters)


def _say(text: str) -> None:
    rank = f"rank {rank_here()}: " if world_size() > 1 else ""
    print(f"routeprof: {rank}{text}", file=sys.stderr)


class ModelFinder(importlib.abc.MetaPathFinder):
    """Changes transformers' base class as soon as it is imported, before any model class is."""

    def __init__(self, attacher: Attacher) -> None:
        self.attacher = attacher

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Take only the module of the base class, and only once."""
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module.PreTrainedModel, self.attacher)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def patch(base: Any, attacher: Attacher) -> None:
    """Watch every way in which a model comes to be: its own ``__init__``, and loading."""
    subclassed = base.__init_subclass__.__func__

    def init_subclass(cls: Any, **kwargs: Any) -> None:
        subclassed(cls, **kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = attacher.whole(cls.__init__)

    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[arg-type]
    for name in ("from_pretrained", "_from_config"):
        loader = getattr(base, name)
        setattr(base, name, classmethod(attacher.whole(loader.__func__)))


def run_program(arguments: list[str]) -> None:
    """Run a script, ``-m MODULE`` or ``-c CODE`` as the interpreter would."""
    first, rest = arguments[0], arguments[1:]
    if first == "-m":
        sys.argv = rest
        _search_first(str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        _search_first("")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        _search_first(str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _search_first(directory: str) -> None:
    """Look for modules there, where the interpreter looks in the directory it was started in."""
    if not sys.flags.safe_path:
        sys.path[0] = directory


def main() -> None:
    """Install the hooks, then become the program."""
    wanted = settings()
    if wanted is None:
        sys.exit(f"routeprof: {SETTINGS_VARIABLE} is not set; start programs with routeprof run")
    if wants(wanted, rank_here()):
        sys.meta_path.insert(0, ModelFinder(Attacher(wanted)))
    run_program(sys.argv[1:])


if __name__ == "__main__":
    main()
