"""Other people's recordings of real models, against the figures that are known of them.

The figures are those of ``../shared/realdata/README.md``, which were found without routeprof.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.formats import Told, convert

ESFT = [f"esft-dsv2lite/expert_weights_{layer}.txt" for layer in (1, 13, 26)]


def rounded(found: list[float]) -> list[float]:
    """A median, a minimum, a maximum and a Gini coefficient, with the digits of the README."""
    return [round(float(value), digits) for value, digits in zip(found, (2, 2, 2, 3), strict=True)]


def test_every_file_is_read_or_refused_for_what_it_is(realdata: Path):
    refused = {}
    for path in sorted(realdata.glob("*/*")):
        try:
            assert routeprof.load(path).counts.sum()
        except UsageError as error:
            refused[path.name] = str(error)
    assert len(refused) == 7
    for name, message in refused.items():
        assert "\n" not in message
        if name.endswith(".npy"):
            assert "which expert is where" in message
        elif name.endswith(".txt"):
            assert "--top-k" in message
        else:
            assert name in ("summary.json", "raw_polyglot.json")
            assert "shares by expert, not counts" in message


@pytest.mark.parametrize(
    ("name", "median", "lowest", "highest", "gini"),
    [
        ("decode_in2000out100", 5.79, 2.61, 10.49, 0.377),
        ("prefill_in2048", 7.06, 4.02, 13.65, 0.417),
    ],
)
def test_deepseek_v3_under_sglang(
    realdata: Path, name: str, median: float, lowest: float, highest: float, gini: float
):
    profile = routeprof.load(realdata / "sglang-dsv3" / f"{name}.json")
    rows = profile.layers()
    captured = rows[rows["imbalance_ratio"].notna()]
    assert captured["layer"].tolist() == list(range(3, 61))
    assert profile.states[:3] == ("dense",) * 3
    ratios = captured["imbalance_ratio"]
    found = [ratios.median(), ratios.min(), ratios.max(), captured["gini"].mean()]
    assert rounded(found) == [median, lowest, highest, gini]
    assert captured["dead_experts"].sum() == 0
    assert rows["top_k"].isna().iloc[3:].all()


def test_deepseek_v3_on_ranks(realdata: Path):
    profile = routeprof.load(realdata / "sglang-dsv3" / "decode_in2000out100.json")
    assert int(profile.layers()["hot_cold_ratio"].max()) == 253
    for ranks, due in ((32, 1.633), (8, 0.880)):
        loads = profile.rank_loads(ranks)
        loads = loads[loads["placement"] == "contiguous"]
        worst = loads.groupby("layer")["load_over_mean"].max()
        assert round(float((worst - 1).mean()), 3) == due
        if ranks == 32:
            assert round(float((1 / worst).mean()), 3) == 0.434


def test_the_balanced_reference(realdata: Path):
    profile = routeprof.load(realdata / "cdmoe" / "dynamic_weight.json")
    rows = profile.layers()
    assert profile.counts.shape == (27, 64)
    assert rows["assignments"].unique().tolist() == [283_740]
    ratios = rows["imbalance_ratio"]
    found = [ratios.median(), ratios.min(), ratios.max(), rows["gini"].mean()]
    assert rounded(found) == [1.46, 1.16, 1.85, 0.091]
    assert not profile.has("steps")
    values = json.loads((realdata / "cdmoe" / "dynamic_weight.json").read_text())
    for key in ("0-2", "26-63", "13-5"):
        layer, expert = map(int, key.split("-"))
        assert profile.counts[layer, expert] == values[key][1]


def test_a_log_with_warm_up_rows(realdata: Path):
    """Of two launches, one after another: each began with 8,192 dummy tokens."""
    profile = routeprof.load(realdata / "vllm-routes" / "qwen15moe.jsonl")
    (row,) = profile.layers().to_dict("records")
    assert (row["tokens"], row["top_k"], row["experts"]) == (18_818, 4, 60)
    assert round(row["imbalance_ratio"], 1) == 13.2
    real = profile.select(tag="untagged")
    (row,) = real.layers().to_dict("records")
    assert row["tokens"] == 18_818 - 16_384
    assert round(row["imbalance_ratio"], 2) == 1.48
    (note,) = [note for note in profile.info.notes if "warm-up" in note]
    assert "16,384 of 18,818 rows" in note
    assert "13.20 with them and 1.48 without" in note
    assert any("warm-up" in finding.evidence for finding in profile.findings())
    sizes = profile.steps()["tokens"].tolist()
    assert sizes[:3] == [8192, 65, 25]
    assert sizes[53:56] == [8192, 91, 25]


def test_tokens_of_sequences(realdata: Path, tmp_path: Path):
    paths = [realdata / name for name in ESFT]
    profile = routeprof.load(convert(paths, tmp_path / "run", told=Told(6, experts=64)))
    assert profile.layer_indices == [1, 13, 26]
    requests = profile.requests()
    assert (len(requests), requests["tokens"].sum()) == (33, 8_327)
    shares = profile.counts / profile.counts.sum(axis=1, keepdims=True)
    published = json.loads((realdata / "esft-dsv2lite" / "summary.json").read_text())
    for place, layer in enumerate(profile.layer_indices):
        due = published["token_scores"][str(layer)]
        for expert in range(64):
            assert round(float(shares[place, expert]), 4) == due[str(expert)]


@pytest.mark.parametrize("top_k", [4, 8, 12])
def test_a_width_that_is_not_the_files(realdata: Path, tmp_path: Path, top_k: int):
    with pytest.raises(UsageError, match="pass the model's --top-k"):
        convert([realdata / ESFT[0]], tmp_path / "run", told=Told(top_k))
