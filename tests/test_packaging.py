"""The wheel holds what the checkout holds, under the names that users import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_LEVEL = {"hooks": "routeprof.hooks", "dashboards": "routeprof.dashboards"}
TOP_LEVEL["sample_data"] = "routeprof.sample_data"


def folders_with_code() -> set[str]:
    """Import names of the folders that hold an ``__init__.py``, links not followed."""
    found = {"routeprof"}
    for top in ("routeprof", *TOP_LEVEL):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join((TOP_LEVEL.get(top, top), *parts[1:])))
    return found


def test_the_list_of_packages_is_complete():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders_with_code()


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_checkout_itself_imports_top_level_folders(name: str):
    assert (ROOT / "routeprof" / name).resolve() == ROOT / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools packs whatever an earlier build left there.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile):
    packed = set(wheel.namelist())
    for top, package in {"routeprof": "routeprof", **TOP_LEVEL}.items():
        for path in (ROOT / top).rglob("*.py"):
            inside = path.relative_to(ROOT / top).as_posix()
            assert f"{package.replace('.', '/')}/{inside}" in packed
    data = {"routeprof/py.typed", "routeprof/sample_data/model/model.safetensors"}
    data |= {f"routeprof/sample_data/prompts/{kind}.txt" for kind in ("code", "json", "prose")}
    assert data <= packed
    assert any(name.startswith("routeprof/dashboards/assets/") for name in packed)


def test_the_wheel_adds_one_top_level_name(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"routeprof"}
