"""routeprof plan as a user sees it."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from routeprof.plan.memory import Setting
from routeprof.plan.memory import plan as planned
from routeprof.plan.model import load_model
from routeprof.plan.precision import precision
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line

MODEL = Path(__file__).parents[2] / "sample_data" / "model"
COLLAPSED = RECORDINGS_DIR / "collapsed"


def test_deepseek_v3_on_eight_gpus_of_80_gb(cli: Cli):
    told = "--gpus 8 --gpu-memory 80GB --dtype bf16 --json".split()
    done = cli("plan", "deepseek-v3", *told)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["weights_bytes"] == 2 * data["parameters"] == 2 * 671_026_404_352
    assert data["active_parameters"] == pytest.approx(37e9, rel=0.02)
    assert data["fits"] is False
    assert len(data["splits"]) == 16
    assert {row["fits"] for row in data["splits"]} == {False}
    assert {row["tp"] * row["dp"] for row in data["splits"]} == {8}
    assert {row["ep"] * row["etp"] for row in data["splits"]} == {8}
    assert data["cache_bytes_per_sequence"] == {"kv": 8192 * 70_272, "state": 0}


def test_json_says_what_the_plan_says(cli: Cli):
    told = "--gpus 4 --nodes 2 --gpu-memory 141GB --dtype fp8 --attention-dtype bf16".split()
    told += "--expert-dtype mxfp4 --hot-dtype fp8 --hot-experts 0.1 --embedding-dtype fp8".split()
    told += "--kv-dtype fp8 --state-dtype bf16 --dispatch-dtype fp8 --length 1000".split()
    told += "--batch 12 --step-tokens 500 --reserve 0.1 --runtime 2GB --graphs 0".split()
    done = cli("plan", "qwen3-next-80b-a3b", *told, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    setting = Setting(
        memory=141 * 10**9,
        length=1000,
        batch=12,
        step_tokens=500,
        precision=precision(
            "fp8",
            attention="bf16",
            experts="mxfp4",
            embeddings="fp8",
            cache="fp8",
            state="bf16",
            hot="fp8",
            hot_experts=0.1,
        ),
        reserve=0.1,
        runtime=2 * 10**9,
        graphs=0,
        dispatch="fp8",
    )
    made = planned(load_model("qwen3-next-80b-a3b"), setting, gpus=4, nodes=2)
    assert data["weights_bytes"] == round(made.weights_bytes)
    assert data["nodes"] == 2
    assert len(data["splits"]) == len(made.splits)
    for row, expected in zip(data["splits"], made.splits, strict=True):
        layout = expected.layout
        assert [row[name] for name in ("tp", "dp", "ep", "etp")] == [
            layout.tp,
            layout.dp,
            layout.ep,
            layout.etp,
        ]
        for part, size in expected.weights.items():
            assert row[f"weights_{part}_bytes"] == round(size)
        assert row["weights_bytes"] == round(expected.weights_bytes)
        assert row["kv_bytes"] == round(expected.kv)
        assert row["fixed_state_bytes"] == round(expected.state) > 0
        assert row["activation_bytes"] == round(expected.activations)
        assert row["dispatch_bytes"] == round(expected.dispatch)
        assert row["combine_bytes"] == round(expected.combine)
        assert row["held_back_bytes"] == round(expected.held_back)
        assert row["free_for_cache_bytes"] == round(expected.free)
        assert row["max_sequences"] == expected.sequences
        assert (row["fits"], row["spans_nodes"]) == (expected.fits, expected.spans_nodes)


def test_the_page_says_whether_it_fits(cli: Cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = cli("plan", "deepseek-v3", "--gpu-memory", "80GB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing fits" in done.stdout
    assert "671.03 B, 37.55 B active" in done.stdout
    assert "1.22 TiB" in done.stdout
    assert "multi-token prediction" in done.stdout
    done = cli("plan", "nemotron-3-nano-30b-a3b", "--gpus", 2, "--top", 1)
    assert "52 layers, 23 route, 6 hold keys and values, 23 hold a fixed state" in done.stdout
    assert "TP 2" in done.stdout
    assert "… and 3 more; --top 4 shows them" in done.stdout


def test_a_narrow_terminal_names_what_it_leaves_out(cli: Cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    done = cli("plan", "mixtral-8x7b", "--gpus", 2)
    assert "not shown at this width" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 72


class Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows and data.strip() and self.lasttag in ("td", "th"):
            self.rows[-1].append(data)


def test_html_and_csv_have_every_layout(cli: Cli, tmp_path: Path):
    page, table = tmp_path / "out" / "plan.html", tmp_path / "out" / "plan.csv"
    done = cli("plan", "mixtral-8x7b", "--gpus", 4, "--html", page, "--csv", table, "--json")
    data = json.loads(done.stdout)
    with table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(data["splits"]) == 9
    for row, expected in zip(rows, data["splits"], strict=True):
        texts = {name: str(value) for name, value in expected.items()}
        texts |= {name: texts[name].lower() for name in ("fits", "spans_nodes")}
        assert row == texts
    tables = Tables()
    tables.feed(page.read_text(encoding="utf-8"))
    assert sum(row[0].startswith("TP ") for row in tables.rows if row) == 9
    assert not tables.links
    assert "script" not in tables.tags


def test_recorded_loads_take_the_place_of_even_ones(cli: Cli, tmp_path: Path):
    page = tmp_path / "plan.html"
    told = ("plan", MODEL, "--gpus", 4, "--gpu-memory", "1GiB", "--runtime", 0, "--graphs", 0)
    even = json.loads(cli(*told, "--json").stdout)
    done = cli(*told, "--recording", COLLAPSED, "--json", "--html", page)
    assert (done.returncode, done.stderr) == (0, "")
    uneven = json.loads(done.stdout)
    assert (even["loads"], uneven["loads"]) == ("even", "measured")
    assert uneven["fullest_rank_over_mean"] > 1.5
    assert uneven["hottest_experts"][0]["over_mean"] >= uneven["hottest_experts"][-1]["over_mean"]
    pick = {(row["dp"], row["ep"]): row["dispatch_bytes"] for row in even["splits"]}
    more = {(row["dp"], row["ep"]): row["dispatch_bytes"] for row in uneven["splits"]}
    assert more[4, 4] > pick[4, 4]
    assert more[4, 1] == pick[4, 1]
    assert "Hottest experts" in page.read_text(encoding="utf-8")
    text = cli(*told, "--recording", COLLAPSED).stdout
    assert "as recorded" in text
    assert "hottest in layer" in text


def test_hot_experts_say_what_share_they_get(cli: Cli):
    told = ("--expert-dtype", "int4", "--hot-dtype", "bf16", "--hot-experts", 0.25, "--json")
    done = cli("plan", MODEL, "--gpus", 2, "--recording", COLLAPSED, *told)
    data = json.loads(done.stdout)
    assert 0.25 < data["hot_experts_share_of_assignments"] <= 1


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """The sample model's recording, as it would be made with its configuration."""
    copy = Path(shutil.copytree(COLLAPSED, tmp_path / "configured"))
    info = json.loads((copy / "recording.json").read_text())
    info["model"]["config"] = json.loads((MODEL / "config.json").read_text())
    (copy / "recording.json").write_text(json.dumps(info))
    return copy


def test_the_recorded_model_needs_no_other_name(cli: Cli, configured: Path):
    options = ("--recording", configured, "--gpus", 4, "--gpu-memory", "8GiB", "--json")
    named, own = (json.loads(cli("plan", *told, *options).stdout) for told in ([MODEL], []))
    assert (
        own.pop("model") == json.loads((configured / "recording.json").read_text())["model"]["name"]
    )
    assert named.pop("model").endswith("config.json")
    assert own == named
    assert own["loads"] == "measured"
    other = json.loads(cli("plan", "mixtral-8x7b", "--json").stdout)
    assert other["model"] == "mixtral-8x7b"


def test_without_any_model_it_says_what_to_pass(cli: Cli, configured: Path):
    assert "no model to plan: pass a config.json" in one_line(cli("plan"))
    assert "does not have its model's configuration" in one_line(
        cli("plan", "--recording", COLLAPSED)
    )
    info = json.loads((configured / "recording.json").read_text())
    del info["model"]["config"]["hidden_size"]
    (configured / "recording.json").write_text(json.dumps(info))
    assert "the recording's configuration lacks hidden_size" in one_line(
        cli("plan", "--recording", configured)
    )


def test_a_directory_of_another_family_is_planned(cli: Cli, tmp_path: Path):
    from transformers import Glm4MoeConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    Glm4MoeConfig(num_hidden_layers=3, vocab_size=100, **sizes).save_pretrained(tmp_path)
    done = cli("plan", tmp_path, "--gpus", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["family"] == "glm4_moe"
    assert data["splits"][0]["activation_bytes"] is None
    assert "not a family that routeprof knows" in data["notes"][0]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (("no-such-model",), "no known model"),
        (("mixtral-8x7b", "--gpu-memory", "lots"), "is no size"),
        (("mixtral-8x7b", "--gpu-memory", "-1GB"), "is no size"),
        (("mixtral-8x7b", "--gpus", 8, "--nodes", 3), "divides the GPUs"),
        (("mixtral-8x7b", "--gpus", 0), "pass 1 or more"),
        (("mixtral-8x7b", "--dtype", "fp7"), "is not one of fp32, bf16"),
        (("mixtral-8x7b", "--expert-dtype", "x"), "expert-dtype 'x' is not one of"),
        (("mixtral-8x7b", "--kv-dtype", "mxfp4"), "kv-dtype 'mxfp4' is not one of"),
        (("mixtral-8x7b", "--reserve", 1.5), "reserve is 1.5"),
        (("mixtral-8x7b", "--reserve", "nan"), "reserve is nan"),
        (("mixtral-8x7b", "--hot-dtype", "bf16", "--hot-experts", 2), "hot-experts is 2"),
        (("mixtral-8x7b", "--length", 0), "length is 0"),
        (("mixtral-8x7b", "--batch", -1), "batch is -1"),
        (("mixtral-8x7b", "--top", 0), "top is 0"),
        (("mixtral-8x7b", "--runtime", "x"), "is no size"),
        (("mixtral-8x7b", "--phase", "decode"), "pass --recording DIR, too"),
        (("mixtral-8x7b", "--recording", COLLAPSED), "pass a recording of this model"),
        (("mixtral-8x7b", "--recording", "missing"), ""),
        (("mixtral-8x7b", "--csv", "/dev/null/x.csv"), "pass another file"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, told: tuple[object, ...], says: str):
    assert says in one_line(cli("plan", *told))


def test_a_config_that_is_none_is_one_line(cli: Cli, tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in one_line(cli("plan", "config.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "config.json lacks" in one_line(cli("plan", "."))


def test_help_has_an_example(cli: Cli):
    assert "routeprof plan deepseek-v3" in cli("plan", "--help").stdout


def test_a_known_model_needs_neither_torch_nor_transformers(tmp_path: Path):
    import subprocess

    code = (
        "import sys; sys.argv = ['routeprof', 'plan', 'deepseek-v3', '--json']\n"
        "from routeprof.commands import app\n"
        "app(standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
