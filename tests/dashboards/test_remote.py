"""The page's buttons against a real recording of a model that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.capture.control import here, rank_states
from routeprof.dashboards import create_app
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.remote import ask
from tests.commands.conftest import MIXTRAL
from tests.dashboards.made import Writer
from tests.dashboards.test_views import text_of


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A recording of a model that runs all the time."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    done = threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not done.is_set():
                model(input_ids=torch.randint(1, 64, (1, 8)))

    with routeprof.record(model, tmp_path / "live", window=0.1):
        thread = threading.Thread(target=serve)
        thread.start()
        yield tmp_path / "live"
        done.set()
        thread.join()


def state(path: Path) -> str:
    return rank_states(path)[0].state


def test_hold_record_and_stop(running: Path) -> None:
    library = Library(running)
    assert ask(library, "", "paused") == []
    assert state(running) == "paused"
    assert ask(library, "", "recording") == []
    assert state(running) == "recording"
    assert ask(library, "", "stopped") == []
    assert state(running) == "stopped"


def test_a_rank_that_is_gone_is_named(writer: Writer) -> None:
    host, namespace = here()
    gone = {"pid": 2**22 + 1, "host": host, "pid_namespace": namespace}  # above the largest pid
    writer.writer.write_state(**gone)
    (line,) = ask(Library(writer.path), "", "paused")
    assert "its process is gone" in line


def test_no_recording_no_request(tmp_path: Path) -> None:
    (line,) = ask(Library(tmp_path), "", "paused")
    assert "recording" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("control", [False, True])
def test_buttons_are_there_only_when_asked_for(recorded: Path, control: bool) -> None:
    app = create_app(recorded, control=control)
    assert ("End this recording" in text_of(app.layout())) is control
    inputs = [str(item["inputs"]) for item in app.callback_map.values()]
    assert any("submit_n_clicks" in text for text in inputs) is control
