"""The width that a configuration tells is that of the experts' matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from routeprof.hooks.discovery import find_layers
from routeprof.hooks.transformers import _model_info
from routeprof.hooks.widths import expert_width

# With dense and expert layers of different width where the family has both.
MODELS = (
    "mixtral qwen2_moe qwen3_moe qwen3_next deepseek_v3 olmoe jamba granitemoehybrid gpt_oss "
    "glm4_moe llama4_text nemotron_h longcat_flash"
).split()


@pytest.mark.parametrize("model_type", MODELS)
def test_of_the_default_model_of_a_family(model_type: str):
    model = default_model(model_type)
    layer = next(item for item in find_layers(model) if item.layer.kind == "moe")
    hidden, told = model.config.hidden_size, _model_info(model, "").expert_width
    down = [
        parameter.numel()
        for name, parameter in layer.module.named_parameters()
        if name.startswith("experts.") and ("down" in name or "w2" in name) and "bias" not in name
    ]
    experts = layer.layer.experts - layer.layer.zero_experts
    assert told is not None
    assert sum(down) == experts * hidden * told


def default_model(model_type: str) -> Any:
    """The family's own default sizes, without storage."""
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


class Mixed:
    """A configuration whose layers differ, which transformers guards like this."""

    @property
    def moe_intermediate_size(self) -> int:
        raise RuntimeError("ambiguous")


def test_nobody_said():
    assert expert_width(None) is None
    assert expert_width(AutoConfig.for_model("gpt2")) is None
    assert expert_width(AutoConfig.for_model("ernie4_5_vl_moe_text")) is None  # one a modality
    assert expert_width(Mixed()) is None
