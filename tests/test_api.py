"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import routeprof

HEAVY = "pandas plotly dash typer rich matplotlib".split()


def imported_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names():
    assert routeprof.__all__ == ["LayerSpec", "Profile", "Recording", "errors", "load", "record"]
    for name in routeprof.__all__:
        assert getattr(routeprof, name).__name__.endswith(name)
        assert name in dir(routeprof)
    with pytest.raises(AttributeError, match="no_such_name"):
        routeprof.no_such_name  # noqa: B018


def test_every_error_is_a_routeprof_error_with_an_exit_code():
    for name, error in vars(routeprof.errors).items():
        if isinstance(error, type):
            assert issubclass(error, routeprof.errors.RouteprofError), name
            assert error.exit_code == 2


def test_importing_routeprof_imports_nothing_large():
    assert not {"torch", "numpy", "pyarrow", *HEAVY} & imported_by("import routeprof")


def test_what_runs_in_the_engine_imports_no_tables_and_no_web():
    modules = imported_by("import routeprof.capture.recorder, routeprof.hooks.transformers")
    assert "torch" in modules
    assert not set(HEAVY) & modules
