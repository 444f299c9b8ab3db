"""An engine that serves by hand, and what its recording must hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from routeprof.capture.recorder import Recorder
from tests.capture.oracle import Step
from tests.capture.recordings import LAYERS, flush, loads, recorder_of, serve, some

NEVER = 3600.0


class Engine:
    """An engine that serves, on a thread of its own, and notes what it ran."""

    def __init__(self, directory: Path, window: float = NEVER) -> None:
        self.recorder, self.capture = recorder_of(
            directory, LAYERS, level="steps", window=window, ring=1 << 17
        )
        self.steps: list[Step] = []
        self._random = np.random.default_rng(7)

    def serve(self, steps: int = 10) -> None:
        """Run steps here."""
        for _ in range(steps):
            self.steps.append(some(self._random))
            serve(self.capture, self.steps[-1])

    def beside(self, work: Callable[[Recorder], None]) -> None:
        """Serve on another thread while the work is done here."""
        over = threading.Event()

        def serve_on() -> None:
            while not over.is_set():
                self.serve(1)

        thread = threading.Thread(target=serve_on)
        thread.start()
        try:
            work(self.recorder)
        finally:
            over.set()
            thread.join()

    def said(self, **more: object) -> dict[str, object]:
        """Stop, and say what was served."""
        self.recorder.close()
        return {**self.counted(), **more}

    def counted(self) -> dict[str, object]:
        """What the recording must hold once all is written."""
        sums = [load.tolist() for load in loads(LAYERS, self.steps)]
        return {"steps": len(self.steps), "loads": sums}


def turn(recorder: Recorder) -> bool:
    """One turn of the drain thread; whether the window was written."""
    try:
        flush(recorder)
    except OSError as error:
        recorder._not_written(error)
        return False
    return True


def end_window(recorder: Recorder) -> None:
    """End a window as soon as the step that runs is over."""
    with recorder._collect_lock:
        assert recorder._collect(final=False, patience=600.0)
