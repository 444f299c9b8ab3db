"""The configuration that hooks write down is the model's own, and never breaks a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

import routeprof
from routeprof.errors import UsageError
from routeprof.hooks.configuration import configuration
from routeprof.plan.config import READERS, shape_of
from tests.hooks.conftest import Record, model_of, profile_of
from tests.zoo.families import FAMILIES, config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_it_is_what_transformers_writes(family: Any):
    made = config(family)
    found = configuration(made)
    assert found == json.loads(made.to_json_string(use_diff=False))
    strict(found)


@pytest.mark.parametrize("family", [name for name in READERS if name in CONFIG_MAPPING])
def test_a_plan_reads_it_as_it_reads_a_config_json(family: str, tmp_path: Path):
    made = AutoConfig.for_model(family)
    made.save_pretrained(tmp_path)
    found = configuration(made)
    assert found is not None
    written = json.loads((tmp_path / "config.json").read_text())
    try:
        shape = shape_of(written)
    except UsageError as error:  # DeepSeek-V2 has no top-k by default
        with pytest.raises(UsageError, match=str(error)):
            shape_of(found)
    else:
        assert shape_of(found) == shape


def strict(value: Any) -> str:
    """As JSON, without what other readers refuse."""
    return json.dumps(value, allow_nan=False)


class Odd(PretrainedConfig):
    model_type = "odd"

    def __init__(self, **fields: Any):
        super().__init__(**fields)
        self.dtypes = [torch.bfloat16, torch.float32]
        self.limits = (0.0, float("inf"), float("-inf"), float("nan"))
        self.names = {"b", "a"}
        self.scale = np.float32(0.5)
        self.size = np.int64(3)
        self.by_layer = {0: (1, 2), "x": None}
        self.device = torch.device("cpu")
        self.inner = [PretrainedConfig(hidden_size=3)]


def test_what_json_cannot_hold_is_written_as_text():
    found = configuration(Odd(hidden_size=5))
    assert found is not None
    assert found["hidden_size"] == 5
    assert found["dtypes"] == ["bfloat16", "float32"]
    infinite = [{"__float__": name} for name in ("Infinity", "-Infinity", "NaN")]
    assert found["limits"] == [0.0, *infinite]
    assert found["names"] == ["a", "b"]
    assert (found["scale"], found["size"]) == (0.5, 3)
    assert found["by_layer"] == {"0": [1, 2], "x": None}
    assert found["device"] == "cpu"
    assert found["inner"][0]["hidden_size"] == 3
    assert json.loads(strict(found)) == found


class Broken(PretrainedConfig):
    model_type = "broken"

    def to_dict(self) -> dict[str, Any]:
        raise RuntimeError("no")


class Endless(PretrainedConfig):
    model_type = "endless"

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        found["me"] = found
        return found


class Settings:
    """Not one of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "mixtral"}


@pytest.mark.parametrize("other", [None, {}, Settings(), PretrainedConfig, Broken(), Endless()])
def test_what_is_none_is_not_known(other: Any):
    assert configuration(other) is None


def test_it_is_recorded(record: Record):
    model = model_of("mixtral")
    with record(model) as recording:
        pass
    info = profile_of(recording).info.model
    assert info.config == json.loads(model.config.to_json_string(use_diff=False))
    strict(json.loads((Path(recording.directory) / "recording.json").read_text()))


@pytest.mark.parametrize("config", [Broken(), Odd(), Settings(), None])
def test_whatever_it_is_the_model_is_recorded(config: Any, record: Record):
    model = model_of("mixtral")
    model.config = config
    with record(model) as recording, torch.no_grad():
        model.model(torch.tensor([[3, 4, 5]]))
    profile = routeprof.load(recording.directory)
    assert profile.coverage == 1.0
    assert profile.info.model.config == configuration(config)
