"""``python -m routeprof.hooks.launch``: a program whose MoE models are recorded.

``routeprof run`` starts it in place of the program's own interpreter call. It waits for
transformers to be imported, and attaches to every model with MoE layers that the program makes.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

SETTINGS_VARIABLE = "ROUTEPROF_RUN"
MODELS = "transformers.modeling_utils"


class Attacher:
    """Records every finished model, each into a directory of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.out = Path(settings.pop("out"))
        self.settings = settings
        self.recordings: list[Any] = []
        self._making = threading.local()
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
        from routeprof.hooks.transformers import record

        model = result[0] if isinstance(result, tuple) else result
        if not isinstance(model, nn.Module) or _is_empty(model):
            return
        try:
            number = len(self.recordings)
            out = self.out if not number else self.out.with_name(f"{self.out.name}.{number + 1}")
            recording = record(model, out, **self.settings)
        except (NoMoELayersError, AlreadyAttachedError):
            return
        except Exception as error:
            _say(f"could not attach to {type(model).__name__}: {error}")
            return
        self.recordings.append(recording)
        for message in recording.messages:
            _say(message)

    def finish(self) -> None:
        """Write what is left when the program ends."""
        for recording in self.recordings:
            recording.stop()
            _say(f"recorded {recording.info.model.name} in {recording.directory}")
        if not self.recordings:
            _say("no MoE model was made through transformers: nothing was recorded")


def _is_empty(model: Any) -> bool:
    """Whether all of it is on the meta device: a plan of a model, not one that can run."""
    parameters = list(model.parameters())
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not hooked and all(parameter.device.type == "meta" for parameter in parameters)


def _say(text: str) -> None:
    print(f"routeprof: {text}", file=sys.stderr)


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
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Install the hooks, then become the program."""
    attacher = Attacher(json.loads(os.environ.pop(SETTINGS_VARIABLE)))
    sys.meta_path.insert(0, ModelFinder(attacher))
    run_program(sys.argv[1:])


if __name__ == "__main__":
    main()
