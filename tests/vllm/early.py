"""An oracle that also sets a capture function of its own before any plugin sees the model."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.vllm.oracle import Oracle, _capture, runners, witness

load_model = CPUModelRunner.load_model


def load_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
    load_model(self, *args, **kwargs)
    for index, runner in runners(self.model).items():
        runner.router.set_capture_fn(_capture(witness.early, index, runner))


CPUModelRunner.load_model = load_and_capture


class EarlyOracle(Oracle):
    """As ``Oracle``."""
