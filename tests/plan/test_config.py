"""Finding and reading a config.json; what is wrong with one gets one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from routeprof.errors import UsageError
from routeprof.plan.config import PREDICTION, VISION, read_config, shape_of
from routeprof.plan.known import known_config
from routeprof.plan.model import load_model, model_of
from routeprof.plan.parameters import total, weights
from routeprof.plan.shape import Attention, LatentAttention, Mamba2
from tests.plan.models import FAMILIES, default_config, made, on_meta, tiny_values

NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
# Nemotron-H's layers are listed; Granite attends nowhere by default.
NOT_NEEDED = {("nemotron_h", "num_hidden_layers"), ("granitemoehybrid", "num_attention_heads")}


def written(tmp_path: Path, values: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_a_file_its_directory_and_a_name_are_read_alike(tmp_path: Path) -> None:
    values = known_config("mixtral-8x7b")
    path = written(tmp_path, values)
    for source in (str(path), str(tmp_path), "mixtral-8x7b", "mistralai/Mixtral-8x7B"):
        assert read_config(source)[0] == values
    assert load_model(str(tmp_path)).weights == load_model("mixtral-8x7b").weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_transformers_saved_is_read(family: str, tmp_path: Path) -> None:
    configuration = default_config(family)
    configuration.save_pretrained(tmp_path)
    assert model_of(configuration.to_dict()).weights == load_model(str(tmp_path)).weights


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not JSON", "is not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ("{}", "lacks model_type"),
        ('{"model_type": 3}', "lacks model_type"),
        ("[" * 100_000, "is not JSON"),
        ('{"model_type": "mixtral"}', "lacks num_local_experts"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load_model(str(written(tmp_path, text)))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UsageError, match="is not JSON"):
        load_model(str(path))


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_missing_or_wrong_are_named(family: str) -> None:
    values = default_config(family).to_dict()
    for name in NEEDED:
        if (family, name) in NOT_NEEDED:
            continue
        left = {key: value for key, value in values.items() if key != name}
        with pytest.raises(UsageError, match=f"config.json lacks {name}"):
            shape_of(left)
        for wrong in ("8", 0, -1, 1.5, True, [8], 10**30):
            with pytest.raises(UsageError, match=name) as caught:
                shape_of(values | {name: wrong})
            assert "\n" not in str(caught.value)


@given(
    family=st.sampled_from(FAMILIES),
    name=st.integers(0, 10**6),
    value=st.sampled_from([None, "x", -1, 0, 1, 2.5, [], ["x"], {}, True, 10**20, [1], "auto"]),
)
@settings(deadline=None, max_examples=300)
def test_any_field_may_be_wrong(family: str, name: int, value: Any) -> None:
    """Either a model comes out, or one line."""
    values = DEFAULTS[family]
    field = sorted(values)[name % len(values)]
    if field == "model_type":
        return
    said = ""
    try:
        assert total(weights(shape_of(values | {field: value}))) > 0
    except UsageError as error:
        said = str(error)
    assert "\n" not in said


DEFAULTS = {family: default_config(family).to_dict() for family in FAMILIES}


def test_layers_are_told_one_by_one() -> None:
    with pytest.raises(UsageError, match="type of 3 layers and has 4"):
        shape_of(tiny_values("minimax", {"layer_types": ["full_attention"] * 3}))
    with pytest.raises(UsageError, match="'other' are not known"):
        shape_of(tiny_values("minimax", {"layer_types": ["other"] * 4}))
    with pytest.raises(UsageError, match="lacks layers_block_type"):
        shape_of({**tiny_values("zamba2"), "layers_block_type": None})
    with pytest.raises(UsageError, match="moe_layer_freq"):
        shape_of(tiny_values("deepseek_v3", {"moe_layer_freq": 2}))


def test_older_names_are_read() -> None:
    """Nemotron-H's pattern, MiniMax's list, and the names of layers before transformers 5."""
    pattern = tiny_values("nemotron_h")
    del pattern["layers_block_type"]
    shape = shape_of(pattern | {"hybrid_override_pattern": "M*-E"})
    kinds = [type(layer.mixer or layer.mlp).__name__ for layer in shape.layers]
    assert kinds == ["Mamba2", "Attention", "Mlp", "Moe"]
    listed = shape_of({**tiny_values("minimax"), "attn_type_list": [0, 0, 1, 0]})
    assert [isinstance(layer.mixer, Attention) for layer in listed.layers] == [0, 0, 1, 0]
    old = shape_of(tiny_values("granitemoehybrid", {"layer_types": ["mamba"] * 3 + ["attention"]}))
    assert [isinstance(layer.mixer, Mamba2) for layer in old.layers] == [1, 1, 1, 0]


def test_the_language_model_is_read_out_of_a_larger_one() -> None:
    text = AutoConfig.for_model("llama4_text").to_dict()
    outer = {"model_type": "llama4", "text_config": text, "tie_word_embeddings": False}
    shape = shape_of(outer)
    assert shape.family == "llama4_text"
    assert VISION in shape.notes
    del text["tie_word_embeddings"]
    assert shape_of(outer | {"text_config": text, "tie_word_embeddings": True}).tied
    assert not shape_of(outer | {"text_config": text}).tied
    assert total(weights(shape)) == sum(one.numel() for one in on_meta(made(text)).parameters())


def test_what_is_left_out_is_said() -> None:
    assert PREDICTION in load_model("deepseek-v3").notes
    assert any("quantised (fp8)" in note for note in load_model("deepseek-v3").notes)
    assert not load_model("mixtral-8x7b").notes


def test_kinds_of_layers() -> None:
    shape = load_model("deepseek-v3").shape
    assert shape is not None
    assert all(isinstance(layer.mixer, LatentAttention) for layer in shape.layers)
    assert [at for at, _ in shape.moes] == list(range(3, 61))
