"""Stand-ins for modules that SGLang imports and its CPU engine never uses.

PyPI has no build of them for the torch that runs here (torchvision, torchaudio, torchcodec), or
they would bring much for nothing (timm, decord, nest_asyncio). A finder at the end of the import
path serves an empty module of that name: any attribute is a class that does nothing. Real
packages, where they are installed, come first.

``environment.sh`` makes every interpreter of the environment import this at its start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAMES = ("decord", "nest_asyncio", "timm", "torchaudio", "torchcodec", "torchvision")
KERNELS = ("vllm", "vllm._custom_ops")
"""Only these of vLLM, whose kernels SGLang names where there is no accelerator."""
ASKS_ONLY = "transformers.utils.import_utils"
"""Looks modules up to see what is installed; it must not find these."""


class _Anything(type):
    """Metaclass of what a stand-in holds: its attributes are such classes again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)


def _thing(name: str) -> Any:
    return _Anything(name, (), {"__new__": _refuse})


def _refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"{cls.__name__} is a stand-in of tests/sglang, not the real thing")


class StandIn(ModuleType):
    """An empty module and package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins after everybody else has looked."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NAMES and name not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Serve the stand-ins, and hide them from who only asks whether a package is there."""
    really_find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        found = really_find(name, package)
        asker = sys._getframe(1).f_globals.get("__name__")
        if found is not None and asker == ASKS_ONLY and isinstance(found.loader, StandInFinder):
            return None
        return found

    importlib.util.find_spec = find_spec
    sys.meta_path.append(StandInFinder())


install()
