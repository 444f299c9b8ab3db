"""Examples in docs/ci.md and docs/alerts.md are as they are printed there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from routeprof.testing import assert_balanced

ROOT = Path(__file__).parents[1]
CI, ALERTS = ((ROOT / "docs" / name).read_text() for name in ("ci.md", "alerts.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def examples(page: str) -> list[tuple[str, str]]:
    """Each command in a page, and what it prints."""
    text = "".join(block for block in blocks(page, "text") if block.startswith("$ "))
    return re.findall(r"^\$ routeprof (.*)\n((?:[^$].*\n)*)", text, re.MULTILINE)


def printed(words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"}
    done = subprocess.run(
        [sys.executable, "-m", "routeprof", *shlex.split(words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env=environment,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("words_and_text", examples(CI), ids=lambda pair: pair[0][-40:])
def test_what_check_prints(words_and_text: tuple[str, str]):
    words, text = words_and_text
    assert printed(words) == text


def test_what_watch_prints():
    ((words, text),) = examples(ALERTS)
    assert words.endswith(" --on-finding ./page-me.sh")
    shown = printed(words.replace("./page-me.sh", "true"))
    assert re.sub(r"^[\d:]{8}", "", shown) == re.sub(r"^[\d:]{8}", "", text)


def test_the_xml(tmp_path: Path):
    words = "sample_data/recordings/collapsed --max-imbalance 8 --gpus 8 --max-rank-imbalance 1.5"
    printed(f"check {words} --junit {tmp_path / 'check.xml'}")
    lines = [line.strip() for line in (tmp_path / "check.xml").read_text().splitlines()]
    (xml,) = blocks(CI, "xml")
    shown = [line.strip() for line in xml.splitlines()]
    start = lines.index(shown[0])
    assert lines[start : start + len(shown)] == shown


def test_assertions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    exec(blocks(CI, "python")[1], {})
    with pytest.raises(AssertionError):
        assert_balanced("sample_data/recordings/collapsed", max_imbalance=3)
