"""Real faults: small, read-only and bad file systems, and programs that run into them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.profile import Profile
from tests.capture.recordings import LAYERS
from tests.trouble.shim import compiled, environment

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/trouble.md").read_text("utf-8").split())


def program(
    module: str, *words: object, env: dict[str, str] | None = None, status: int = 0
) -> Lines:
    """Run a program of this package to its end."""
    command = [sys.executable, "-m", f"tests.trouble.{module}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == status, done.stderr
    return Lines([json.loads(line) for line in done.stdout.splitlines()], done.stderr)


class Lines(list):
    """What a program printed, and what it said on stderr."""

    def __init__(self, lines: list[dict], said: str) -> None:
        super().__init__(lines)
        self.said = said


def documented(line: str, **names: object) -> bool:
    """Whether docs/trouble.md has these very words; paths stand there under the given names."""
    for name, path in names.items():
        line = line.replace(str(path), name)
    return " ".join(line.split()) in PAGE


def whole(directory: Path, said: dict) -> Profile:
    """The recording, which holds all that was served."""
    profile = routeprof.load(directory)
    for row, expected in zip(profile.counts, said["loads"], strict=True):
        assert np.ma.getdata(row)[: len(expected)].tolist() == expected
    assert profile.totals.unread == ()
    assert len(profile.steps()) == len(LAYERS) * said["steps"]
    return profile


@pytest.fixture(scope="session")
def shimmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict]]:
    """Tells where a function of ``shimmed.py`` recorded, and what it said."""
    folder = tmp_path_factory.mktemp("shim")
    library = compiled(folder)
    if isinstance(library, str):
        pytest.skip(library)
    base = folder / "recordings"
    base.mkdir()
    lines = program("shimmed", base, env=environment(library, base))
    by_name = {line["name"]: line for line in lines}
    return lambda name: (base / name, by_name[name] | {"stderr": lines.said})


def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system of its own while the test runs."""
    place.mkdir()
    _or_skip("mount", *options, str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """2 MiB."""
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "routeprof-test")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """1 MiB, in a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(1 << 20)
    _or_skip("mkfs.ext4", "-q", str(image))
    yield from mounted(tmp_path / "disk", "-o", "loop", str(image))


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Path]:
    """A directory that not even root may change."""
    place = tmp_path / "immutable"
    place.mkdir()
    _or_skip("chattr", "+i", str(place))
    try:
        yield place
    finally:
        subprocess.run(["chattr", "-i", str(place)], check=True)


def _or_skip(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
