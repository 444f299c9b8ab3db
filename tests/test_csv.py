"""The CSV contract: which columns, in what order, written how."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from datetime import datetime

import numpy as np
import pandas as pd
import pytest

import routeprof
from routeprof.report.csv import available, csv_text, to_csv
from tests.capture.oracle import Call, Step, layers_of, random_step
from tests.capture.recordings import flush, recorder_of, serve
from tests.recording import made

COLUMNS = {
    "layers": """phase,tag,layer,layer_name,router,experts,top_k,steps,tokens,assignments,invalid,
        coverage,imbalance_ratio,balancedness,max_violation,hot_cold_ratio,hot_cold_ratio_alive,cv,
        gini,entropy_normalized,effective_experts,dead_experts,top2_share,hottest_expert,
        coldest_expert,step_imbalance_p50,step_imbalance_p95,step_imbalance_max,aux_loss,
        gate_entropy,top1_probability""",
    "experts": "phase,tag,layer,expert,tokens,share,load_over_mean,probability_mass,mean_weight",
    "overflow": """phase,tag,layer,capacity_factor,capacity_rule,overflow_assignments,
        overflow_rate,padding_rate,steps,steps_with_overflow,happened""",
    "windows": "window,phase,tag,layer,start,end,steps,tokens,imbalance_ratio",
    "ranks": "placement,layer,rank,experts,assignments,load_over_mean",
    "steps": """step,layer,time,phase,tokens,requests,imbalance_ratio,max_load,
        overflow_rate_1.0""",
    "requests": """request,tokens,prefill_tokens,decode_tokens,other_tokens,
        divergence_from_all,top_experts""",
    "affinity": "layer,expert,partner,together,together_expected,lift,lift_random",
    "transitions": """layer,expert,next_layer,next_expert,together,together_expected,lift,
        next_share,next_share_random""",
    "repetition": """layer,repetition_first,repetition_first_random,repetition_any,
        repetition_any_random""",
    "findings": "finding,code,severity,layers,evidence,suggestion",
}
KEYS = {
    "layers": ["phase", "tag", "layer"],
    "experts": ["phase", "tag", "layer", "expert"],
    "overflow": ["phase", "tag", "layer", "capacity_factor"],
    "windows": ["window", "phase", "tag", "layer"],
    "ranks": ["placement", "layer", "rank"],
    "steps": ["step", "layer"],
    "requests": ["request"],
    "affinity": ["layer", "expert", "partner"],
    "transitions": ["layer", "expert", "next_layer", "next_expert"],
    "repetition": ["layer"],
    "findings": ["finding"],
}
NUMBERS = set("layer expert partner request window step finding capacity_factor".split())
NUMBERS |= {"next_layer", "next_expert", "rank"}
DETAIL = {"steps", "requests", "affinity", "transitions", "repetition"}
"""Reports that more than level windows has."""

LAYERS = layers_of((8, 2), (6, 3), (4, 1))
"""The last one's hooks never run."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    directory = tmp_path_factory.mktemp("csv") / "r"
    recorder, capture = recorder_of(directory, LAYERS, level="tokens")
    random = np.random.default_rng(61)
    for number in range(12):
        phase = ("prefill", "decode")[number % 2]
        step = random_step(random, LAYERS[:2], 2, 3, phase=phase)
        if number % 3:
            with recorder.tag(f"tag {number % 3}"):
                serve(capture, step)
        else:
            serve(capture, step)
        if number % 5 == 4:
            flush(recorder)
    recorder.close()
    return routeprof.load(directory)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(profile, name):
    expected = "".join(COLUMNS[name].split()).split(",")
    assert csv_text(profile, name).split("\n")[0] == ",".join(expected)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_a_recording_of_nothing(tmp_path, name):
    recorder, _ = recorder_of(tmp_path / "r", LAYERS, level="tokens")
    recorder.close()
    text = csv_text(routeprof.load(tmp_path / "r"), name)
    assert text.split("\n")[0] == "".join(COLUMNS[name].split())


@pytest.mark.parametrize("name", COLUMNS)
def test_bytes(profile, tmp_path, name):
    """The file is the text that a download sends: UTF-8, no BOM, LF, one at the end."""
    written = {file.stem: file.read_bytes() for file in profile.write_csv(tmp_path)}
    assert set(written) == set(COLUMNS)
    data = written[name]
    assert data == csv_text(profile, name).encode("utf-8")
    assert not data.startswith(b"\xef\xbb\xbf")
    assert b"\r" not in data
    assert data.endswith(b"\n")
    assert not data.endswith(b"\n\n")


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_are_sorted_by_their_keys_and_keys_are_unique(profile, name):
    keys = [
        tuple(float(row[key]) if key in NUMBERS else row[key] for key in KEYS[name])
        for row in rows_of(csv_text(profile, name))
    ]
    assert keys == sorted(set(keys))
    assert keys


def test_the_sum_is_called_all(profile):
    for name in ("layers", "experts", "overflow"):
        rows = rows_of(csv_text(profile, name))
        found = {(row["phase"], row["tag"]) for row in rows}
        tags = {"untagged", "tag 1", "tag 2"}
        assert {tag for _, tag in found} == {"all", *tags}
        assert {phase for phase, _ in found} == {"all", "prefill", "decode"}
    selected = rows_of(csv_text(profile.select(phase="decode", tag="tag 1"), "layers"))
    assert {(row["phase"], row["tag"]) for row in selected} == {("decode", "tag 1")}


def test_groups_add_up_to_the_sum(profile):
    rows = rows_of(csv_text(profile, "experts"))
    for pick in (
        lambda row: row["phase"] != "all" and row["tag"] == "all",
        lambda row: row["phase"] == "all" and row["tag"] != "all",
        lambda row: row["phase"] != "all" and row["tag"] != "all",
    ):
        whole = [row for row in rows if row["phase"] == row["tag"] == "all"]
        assert sum(int(row["tokens"]) for row in rows if pick(row)) == sum(
            int(row["tokens"]) for row in whole
        )


def test_what_was_not_captured_is_empty(profile):
    rows = [row for row in rows_of(csv_text(profile, "layers")) if row["layer"] == "20"]
    known = {"phase", "tag", "layer", "layer_name", "router", "experts", "top_k", "steps"}
    for row in rows:
        assert row["coverage"] == "0"
        assert {name for name, cell in row.items() if cell} == known | {"coverage"}


def test_numbers(profile):
    frame = profile.layers(breakdown=True)
    rows = rows_of(csv_text(profile, "layers"))
    for name in ("imbalance_ratio", "gini", "aux_loss", "step_imbalance_p95"):
        expected = ["" if np.isnan(value) else f"{value:.6g}" for value in frame[name]]
        assert [row[name] for row in rows] == expected
    for name in ("tokens", "dead_experts", "hottest_expert"):
        expected = ["" if value is pd.NA else str(int(value)) for value in frame[name]]
        assert [row[name] for row in rows] == expected


def test_whole_numbers_keep_every_digit_and_infinity_is_a_word():
    frame = pd.DataFrame(
        {
            "whole": [2**53 + 1, 10**17],
            "some": pd.array([12345678901, None], dtype="Int64"),
            "real": [1234567.89, np.inf],
            "small": [1e-9 / 3, np.nan],
            "yes": [True, False],
        }
    )
    assert to_csv(frame).split("\n") == [
        "whole,some,real,small,yes",
        "9007199254740993,12345678901,1.23457e+06,3.33333e-10,True",
        "100000000000000000,,inf,,False",
        "",
    ]


def test_a_cold_expert_makes_the_ratio_infinite(tmp_path):
    layers = layers_of((4, 1))
    recorder, capture = recorder_of(tmp_path / "r", layers)
    serve(capture, Step(1, 3, [Call(0, np.array([[0], [1], [1]]))]))
    recorder.close()
    (row,) = (
        row
        for row in rows_of(csv_text(routeprof.load(tmp_path / "r"), "layers"))
        if row["phase"] == "all"
    )
    assert row["hot_cold_ratio"] == "inf"
    assert row["hot_cold_ratio_alive"] == "2"


def test_times_can_be_told_apart(profile):
    for name, columns in (("windows", ["start", "end"]), ("steps", ["time"])):
        frame, rows = (
            profile.windows() if name == "windows" else profile.steps(),
            rows_of(csv_text(profile, name)),
        )
        for column in columns:
            found = [datetime.fromisoformat(row[column]).timestamp() for row in rows]
            assert found == pytest.approx(frame[column].tolist(), abs=1e-6)


HOSTILE = [
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "a,b",
    'say "hi"',
    "two\nlines",
    "carriage\rreturn",
    "客户",
    " leading",
    "'quoted'",
]


@pytest.fixture(scope="module", params=HOSTILE)
def hostile(request, tmp_path_factory):
    """A recording that somebody else wrote: routeprof refuses such tags."""
    text, directory = request.param, tmp_path_factory.mktemp("hostile") / "r"
    layers = tuple(replace(layer, name=text, note=text) for layer in made.LAYERS)
    random = np.random.default_rng(0)
    rows = [made.random_row(random, 0, keys=[("decode", text)]) for _ in range(4)]
    made.write(directory, [rows], layers=layers)
    return text, routeprof.load(directory)


def test_hostile_text_is_no_formula_and_comes_back_whole(hostile):
    text, profile = hostile
    expected = f"'{text}" if text[0] in "=+-@\t\r" else text
    expected = expected.replace("\r", "\n")  # one kind of line break in a file
    rows = rows_of(csv_text(profile, "layers"))
    assert {row["layer_name"] for row in rows} == {expected}
    assert {row["tag"] for row in rows} == {"all", expected}
    assert expected in {row["evidence"] for row in rows_of(csv_text(profile, "findings"))}
    for name in COLUMNS.keys() - DETAIL:
        frame = pd.read_csv(io.StringIO(csv_text(profile, name), newline=""))
        assert list(frame.columns) == "".join(COLUMNS[name].split()).split(",")
        for row in rows_of(csv_text(profile, name)):
            assert None not in row
            for column, cell in row.items():
                try:
                    float(cell)
                except ValueError:
                    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")), column


def test_detail_comes_only_with_its_level(tmp_path):
    made.write(tmp_path / "r", made.random_parts(0))
    profile = routeprof.load(tmp_path / "r")
    assert set(available(profile)) == COLUMNS.keys() - DETAIL
    written = {file.stem for file in profile.write_csv(tmp_path / "out")}
    assert written == COLUMNS.keys() - DETAIL
