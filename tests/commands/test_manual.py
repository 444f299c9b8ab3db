"""The pages on verbs: they show what is printed, they name every verb, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from routeprof.commands import app
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.manual import DOCS, examples, same

PAGES = sorted((DOCS / "commands").glob("*.md"))
LINKED = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def test_pages_on_verbs_show_what_is_printed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "sample_data").symlink_to(RECORDINGS_DIR.parent)
    shown = examples(PAGES)
    assert {command.split()[0] for command, _ in shown} >= {"summary", "top", "report", "convert"}
    for command, output in shown:
        done = cli(*shlex.split(command))
        assert done.returncode == 0, done.stderr
        assert same(done.stdout, output), command


def test_every_verb_is_in_the_table():
    table = (DOCS / "commands" / "README.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for verb in [f"{name} {one}" for one in getattr(command, "commands", ())] or [name]:
            rows = [line for line in table.splitlines() if line.startswith("| `")]
            assert any(f"`{verb}`" in row.split(" | ")[0] for row in rows), verb


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return set(plain)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(found), f"{target} is no heading"
