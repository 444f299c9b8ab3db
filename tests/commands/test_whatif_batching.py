"""whatif batching as a user sees it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.whatif.batching import compare_batching
from tests.commands.conftest import MIXTRAL, Cli
from tests.commands.test_bad_input import one_line

POLICIES = ["fifo", "random", "load_aware"]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()


def record(model: Any, directory: Path, tags: list[str | None], *, new: int = 5) -> Path:
    """A batch of ten requests under each tag; each tag has tokens of its own."""
    torch.manual_seed(1)
    with routeprof.record(model, directory, level="tokens") as recording:
        for place, tag in enumerate(tags):
            ids = torch.randint(1 + 20 * place, 20 + 20 * place, (10, 8))
            options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            if tag is None:
                model.generate(input_ids=ids, **options)
            else:
                with recording.tag(tag):
                    model.generate(input_ids=ids, **options)
    return directory


@pytest.fixture(scope="module")
def tagged(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(model, tmp_path_factory.mktemp("runs") / "tagged", ["code", "prose", "json"])


@pytest.fixture(scope="module")
def untagged(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(model, tmp_path_factory.mktemp("runs") / "untagged", [None, None, None])


def said(cli: Cli, *arguments: object) -> dict[str, Any]:
    done = cli("whatif", "batching", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_json_is_what_python_says(cli: Cli, tagged: Path, phase: str):
    arguments = ("--batch-sizes", "4,5", "--ranks", 4, "--phase", phase, "--seed", 3)
    data = said(cli, tagged, *arguments)
    made = compare_batching(routeprof.load(tagged), [4, 5], ranks=4, phase=phase, seed=3)
    assert (data["phase"], data["ranks"], data["seed"], data["tag"]) == (phase, 4, 3, "all")
    assert (data["known_by"], data["requests"], data["requests_left_out"]) == ("tag", 30, 0)
    assert [row["policy"] for row in data["rows"]] == POLICIES * 2
    for row, one in zip(data["rows"], made.policies, strict=True):
        for name in (
            "batch_size requests batches steps imbalance_ratio straggler_factor "
            "tokens_per_expert_mean tokens_per_expert_median small_gemm_share"
        ).split():
            assert row[name] == getattr(one, name)
        if row["policy"] == "fifo":
            assert row["gains"] is None
            continue
        for name, found in one.gains.items():
            told = row["gains"][name]
            assert told["verdict"] == found.verdict
            assert [told[key] for key in ("value", "lower", "upper")] == [
                found.value,
                found.lower,
                found.upper,
            ]
    assert data["signatures"]["divergence_between"] == made.signatures.between


def test_intervals_that_are_not_known_are_null(cli: Cli, tagged: Path):
    data = said(cli, tagged, "--batch-sizes", 4, "--tag", "code")
    assert data["known_by"] == "prefill"
    assert data["rows"][1]["gains"]["straggler_factor"]["lower"] is None
    assert data["rows"][1]["gains"]["straggler_factor"]["verdict"] == "unknown"
    assert data["signatures"]["divergence_between"] is None
    done = cli("whatif", "batching", tagged, "--batch-sizes", 4, "--tag", "code")
    assert "too few requests to say" in done.stdout


def test_text_says_what_a_gain_is_worth(cli: Cli, tagged: Path):
    data = said(cli, tagged, "--batch-sizes", "5,15", "--ranks", 4)
    done = cli("whatif", "batching", tagged, "--batch-sizes", "5,15", "--ranks", 4)
    assert done.returncode == 0, done.stderr
    words = {"gain": "better", "loss": "worse", "none shown": "no gain shown"}
    lines = done.stdout.splitlines()
    for row in data["rows"][1:3]:
        found = row["gains"]["straggler_factor"]
        (line,) = [
            line for line in lines if f"{found['lower']:.3f} to {found['upper']:.3f}" in line
        ]
        assert line.split()[:2] == ["5", row["policy"].replace("_", "-")]
        assert line.rstrip().endswith(words[found["verdict"]])
    assert [row["gains"] for row in data["rows"][3:]] == [None] * 3
    assert "one batch to fill" in done.stdout
    assert all(len(line) <= 80 for line in lines)


def test_signatures_are_shares_by_layer_and_expert(cli: Cli, tagged: Path, tmp_path: Path):
    said(cli, tagged, "--batch-sizes", 5, "--signatures", "out/signatures.json")
    data = json.loads((tmp_path / "out" / "signatures.json").read_text())
    assert (data["phase"], data["layers"]) == ("decode", [0, 1, 2])
    assert [one["class"] for one in data["classes"]] == ["code", "json", "prose"]
    profile = routeprof.load(tagged)
    for one in data["classes"]:
        # Requests of the same length: their mean shares are the shares of the sum.
        counts = profile.select(phase="decode", tag=one["class"]).counts
        expected = counts / counts.sum(1, keepdims=True)
        assert one["requests"] == 10
        for shares, row in zip(one["shares"], expected.tolist(), strict=True):
            assert shares == pytest.approx(row)
        top = one["top_experts"][0]
        assert top["share"] == pytest.approx(expected.max())
        assert expected[top["layer"], top["expert"]] == pytest.approx(expected.max())


def test_without_tags_prefill_is_what_is_known(cli: Cli, untagged: Path):
    assert said(cli, untagged, "--batch-sizes", 10)["known_by"] == "prefill"
    data = said(cli, untagged, "--batch-sizes", 10, "--phase", "prefill")
    assert data["known_by"] is None
    assert [row["policy"] for row in data["rows"]] == POLICIES[:2]
    done = cli("whatif", "batching", untagged, "--batch-sizes", 10, "--phase", "prefill")
    assert "nothing tells requests apart" in done.stdout


def test_sizes_and_ranks_unset(cli: Cli, tagged: Path):
    data = said(cli, tagged)
    assert data["ranks"] == 8
    assert {row["batch_size"] for row in data["rows"]} == {8}  # 15 requests in a half


def test_help_has_an_example(cli: Cli):
    done = cli("whatif", "batching", "--help")
    assert done.returncode == 0
    assert "Example: routeprof whatif batching" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--batch-sizes 16", "batch size 16 is more than the 15 requests in each half"),
        ("--tag code --batch-sizes 11", "more than the 10 requests in the selection"),
        ("--batch-sizes 4,0", "batch size '0'"),
        ("--batch-sizes=-4", "batch size '-4'"),
        ("--batch-sizes 4,x", "batch size 'x'"),
        ("--batch-sizes=", "batch size ''"),
        ("--ranks 9", "at most 8 ranks"),
        ("--ranks 0", "ranks is 0: pass 1 or more"),
        ("--seed=-1", "seed is -1"),
        ("--phase verify", "not one of decode, prefill"),
        ("--tag nope", "there are code, json, prose"),
        ("--between 1000-2000", "no tokens"),
        ("--signatures {here}", "pass another file to --signatures"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, tagged: Path, tmp_path: Path, arguments: str, says: str):
    words = shlex.split(arguments.format(here=tmp_path))
    assert says in one_line(cli("whatif", "batching", tagged, *words))


def test_other_recordings_get_one_line(cli: Cli, model: Any, tmp_path: Path):
    line = one_line(cli("whatif", "batching", RECORDINGS_DIR / "healthy"))
    assert "level tokens" in line
    assert "level='tokens'" in line
    record(model, tmp_path / "prefills", ["a", "b"], new=1)
    line = one_line(cli("whatif", "batching", "prefills"))
    assert "phase 'decode' does not occur; there are prefill" in line
    with routeprof.record(model, tmp_path / "empty", level="tokens"):
        pass
    assert "no tokens" in one_line(cli("whatif", "batching", "empty"))
