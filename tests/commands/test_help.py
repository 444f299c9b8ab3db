"""Help of each verb, as a terminal of 80 columns shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from routeprof.commands import app
from routeprof.commands.verbs import described


def verbs(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*path, name))
        else:
            yield (*path, name), command


VERBS = dict(verbs(typer.main.get_command(app)))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch):
    """What help prints for a verb."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words: str) -> str:
        return CliRunner().invoke(app, [*words, "--help"], prog_name="routeprof").output

    return show


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_of_a_verb(words: tuple[str, ...], shown):
    text, command = shown(*words), VERBS[words]
    usage = re.search(rf"Usage: routeprof {' '.join(words)} \[OPTIONS\] ?(.*)", text)
    assert usage, text
    assert not set(usage[1]) & set("{}"), usage[1]
    assert f": routeprof {' '.join(words)} " in " ".join(text.split())  # an example
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert all(name in text for name in names), f"{names} are cut off"
            assert parameter.help, f"{names} have no help"


def test_paragraphs_are_broken_by_the_terminal(shown):
    assert described("One\n    line.\n\n    Another\n    one.\n") == "One line.\n\nAnother one."
    lines = shown("whatif", "layout").splitlines()
    begins = next(place for place, line in enumerate(lines) if "Loads of ranks" in line)
    assert len(lines[begins].rstrip()) > 70


def test_verbs_stand_under_headings(shown):
    text = shown()
    headings = re.findall(r"^╭─ (.+?) ─+╮$", text, re.M)
    assert headings[0] == "Options"
    assert "Commands" not in headings
    assert len(headings) == len(set(headings)) > 4
    for words in VERBS:
        assert re.search(rf"^│ {words[0]} ", text, re.M), f"{words[0]} is not listed"
