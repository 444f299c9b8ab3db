"""Every block of docs/recipes.md runs as it stands, and its result is routeprof's own."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import routeprof
from routeprof.profile import Profile
from routeprof.sample_data import RECORDINGS_DIR, load_model
from routeprof.sample_data.record import record_prompts
from routeprof.topology import RankRole
from tests.recording.made import random_parts, write
from tests.recording.s3 import Server, serving

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text("utf-8")
BLOCK = re.compile(r"^## ([^\n]*)$|^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KNOWN = "window start end rank layer phase tag steps expected_tokens cost_seconds".split()
"""Columns of a window that say something of a layer that was not captured, too."""
SAMPLE, DEMO = "sample_data/recordings/healthy", "demo-out/recording"


@dataclass(frozen=True)
class Block:
    heading: str
    language: str
    code: str


def blocks() -> Iterator[Block]:
    heading = ""
    for title, language, code in BLOCK.findall(PAGE):
        heading = title or heading
        if not title:
            yield Block(heading, language, code)


class Session:
    """One reader of the page: a notebook and a DuckDB that keep what earlier blocks made."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.database = duckdb.connect()

    def run(self, block: Block) -> pd.DataFrame | None:
        """What the block shows: the last query's or the last expression's table."""
        if block.language == "sql":
            shown = self.database.sql(block.code)
            return None if shown is None else shown.df()
        tree = ast.parse(block.code)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "recipes.md", "exec"), self.names)
        if last is None:
            return None
        shown = eval(compile(ast.Expression(last.value), "recipes.md", "eval"), self.names)
        if isinstance(shown, duckdb.DuckDBPyRelation):
            return shown.df()
        return shown.to_pandas() if isinstance(shown, pl.DataFrame) else shown


# -- recordings that the page is run on


def add_rank(directory: Path, source: Path, role: dict[str, Any], tags: list[str]) -> None:
    """A further rank with another's windows, steps and tokens of these tags."""
    number = role["rank"]
    target = directory / f"rank-{number:05d}"
    shutil.copytree(source, target)
    wanted = pa.array(tags)
    kept: set[int] = set()
    for path in target.glob("*.parquet"):
        table = pq.read_table(path)
        if "tag" in table.column_names:
            tag = table["tag"].cast(pa.string())
            table = table.filter(pc.is_in(tag, value_set=wanted))
            kept |= set(table["step"].to_pylist()) if "step" in table.column_names else set()
        table = changed(table, "rank", pa.array(np.full(table.num_rows, number, dtype=np.int32)))
        if "window" in table.column_names:  # ranks number their windows by themselves
            table = changed(table, "window", pc.add(table["window"], 100 * number))
        pq.write_table(table, path)
    for path in (*target.glob("tokens-*.parquet"), *target.glob("rows-*.parquet")):
        table = pq.read_table(path)
        pq.write_table(table.filter(pc.is_in(table["step"], value_set=pa.array(kept))), path)
    state = json.loads((target / "rank.json").read_text())
    state["role"] |= role
    (target / "rank.json").write_text(json.dumps(state))


def changed(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def add_ranks(directory: Path, source: Path) -> Path:
    """A data-parallel rank with tokens of its own, and a twin that has none."""
    tags = ["prose", "json", "chinese"]
    add_rank(directory, source, {"rank": 1, "dp": 1, "world_size": 3}, tags)
    twin = {"rank": 2, "tp": 1, "world_size": 3, "owns_tokens": False}
    add_rank(directory, directory / "rank-00000", twin, [*tags, "code", "mixed"])
    return directory


def shipped(name: str, folder: Path) -> Path:
    return shutil.copytree(RECORDINGS_DIR / name, folder / name)


def several(folder: Path) -> Path:
    directory = shipped("healthy", folder)
    return add_ranks(directory, RECORDINGS_DIR / "collapsed" / "rank-00000")


def made(folder: Path) -> Path:
    """Layers of 8 and 6 experts, nulls of every kind, untagged rows; the last rank is a twin."""
    for rank in range(3):
        role = RankRole(rank=rank, world_size=3, owns_tokens=rank < 2)
        write(folder / "made", made_rows(rank), role)
        (folder / "made" / f"rank-{rank:05d}" / "part-000009.tmp").write_bytes(b"PAR1 not whole")
    return folder / "made"


def made_rows(rank: int) -> list[list[dict[str, Any]]]:
    """Rows of each part, one a layer, phase and tag; layer 4 was never captured in mixed steps."""
    parts = random_parts(20 + rank, rank=rank)
    for row in [row for part in parts for row in part]:
        if (row["phase"], row["layer"]) == ("mixed", 4):
            row |= dict.fromkeys(row.keys() - {*KNOWN, "calls"}) | {"calls": 0}
    return [list({place(row): row for row in part}.values()) for part in parts]


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["phase"], row["tag"], row["layer"]


def made_entropy() -> pd.DataFrame:
    """By hand, for routeprof knows no rows that have gate outputs and not their entropy."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in [row for rank in range(2) for part in made_rows(rank) for row in part]:
        if row["entropy_sum"] is not None:
            known.setdefault(place(row), []).append(row)
    means = [
        (*key, math.fsum(row["entropy_sum"] for row in own) / sum(row["gate_rows"] for row in own))
        for key, own in known.items()
    ]
    return pd.DataFrame(means, columns=["phase", "tag", "layer", "gate_entropy"])


RECORDINGS: dict[str, Callable[[Path], Path]] = {
    "healthy": lambda folder: shipped("healthy", folder),
    "collapsed": lambda folder: shipped("collapsed", folder),
    "several": several,
    "made": made,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``routeprof demo`` records, with fewer tokens and two more ranks."""
    directory = tmp_path_factory.mktemp("demo") / "recording"
    record_prompts(load_model(), directory, level="tokens", window=0.05, new_tokens=4)
    return add_ranks(directory, directory / "rank-00000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


# -- what the blocks should show


@dataclass(frozen=True)
class Case:
    name: str
    sample: Profile
    demo: Profile


def rows(frame: pd.DataFrame, columns: list[str]) -> list[str]:
    """Rows as text, sorted: whole numbers stay apart from floats, floats have all digits."""
    values = [[None if pd.isna(value) else value for value in frame[name]] for name in columns]
    plain = [[getattr(one, "item", lambda one=one: one)() for one in own] for own in values]
    return sorted(map(repr, zip(*plain, strict=True)))


def same(shown: pd.DataFrame | None, expected: pd.DataFrame) -> None:
    assert shown is not None
    columns = list(shown.columns)
    assert len(shown)
    assert rows(shown, columns) == rows(expected, columns)


def untagged(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(tag=[None if tag == "untagged" else tag for tag in frame.tag])


def experts(profile: Profile) -> pd.DataFrame:
    return profile.experts()[["layer", "expert", "tokens"]]


def assignments(shown: pd.DataFrame | None, case: Case) -> None:
    whole = case.sample.layers().dropna(subset=["assignments"])
    assert shown is not None
    same(shown, whole if "imbalance_ratio" in shown else experts(case.sample))


def by_phase_and_tag(shown: pd.DataFrame | None, case: Case) -> None:
    table = case.sample.layers(breakdown=True)
    pairs = untagged(table[(table.phase != "all") & (table.tag != "all")])
    assert shown is not None
    if "gate_entropy" not in shown:
        same(shown, pairs.dropna(subset=["assignments"]))
    else:
        same(shown, made_entropy() if case.name == "made" else pairs.dropna(subset="gate_entropy"))


def over_time(shown: pd.DataFrame | None, case: Case) -> None:
    windows = untagged(case.sample.windows().query("layer == 3"))
    assert shown is not None
    if "second" not in shown:
        return same(shown, windows.dropna(subset=["imbalance_ratio"]))
    expected = []
    for second in np.unique(np.ceil(windows.end)):
        layers = case.sample.select(between=(second - 1, second)).layers().set_index("layer")
        if not pd.isna(layers.assignments[3]):
            ratio = layers.imbalance_ratio[3]
            expected.append({"second": float(second), "imbalance_ratio": ratio})
    return same(shown, pd.DataFrame(expected))


def hottest(shown: pd.DataFrame | None, case: Case) -> None:
    zero = case.sample.totals.windows.start.min()
    there = experts(case.sample.select(between=(zero + 0.5, zero + 1.5)))
    assert 0 < there.tokens.sum() < experts(case.sample).tokens.sum()
    order = there.sort_values(["tokens", "layer", "expert"], ascending=[False, True, True])
    same(shown, order.head(5))
    assert shown is not None
    assert shown.tokens.tolist() == order.tokens.head(5).tolist()


def step_frame(profile: Profile) -> pd.DataFrame:
    """Steps, each with its rank's role, its ratio and the window that it lies in."""
    table, windows = profile.step_counts(), profile.totals.windows
    assert profile.files is not None
    dp = {rank.rank: rank.state.role.dp for rank in profile.files.ranks if rank.state}
    experts = np.array([profile.layer(index).experts for index in table.layer])
    number = [
        min(
            (end, window)
            for end, window, own in zip(windows.end, windows.window, windows.rank, strict=True)
            if own == rank and end >= time
        )[1]
        for rank, time in zip(table.rank, table.time, strict=True)
    ]
    columns = {name: getattr(table, name) for name in ("rank", "layer", "tokens")}
    ratio = table.counts.max(1) * experts / table.counts.sum(1)
    own = [dp[rank] for rank in table.rank]
    return pd.DataFrame(columns | {"ratio": ratio, "window": number, "dp": own})


def of_steps(shown: pd.DataFrame | None, case: Case) -> None:
    assert shown is not None
    keys = ["dp", "layer"] if "dp" in shown else ["rank", "window", "layer"]
    groups = step_frame(case.demo).groupby(keys)
    sums = {"steps": ("ratio", "size"), "tokens": ("tokens", "sum"), "worst": ("ratio", "max")}
    same(shown, groups.agg(**sums).reset_index())
    whole = shown.groupby("layer").tokens.sum()
    assert whole.tolist() == case.demo.layers().tokens.tolist()
    assert set(shown[keys[0]]) == {0, 1}


def of_tokens(shown: pd.DataFrame | None, case: Case) -> None:
    assert shown is not None
    summed = shown.groupby("expert").tokens.sum()
    assert summed.tolist() == experts(case.demo).query("layer == 0").tokens.tolist()
    table = case.demo.tokens(0)
    pairs = zip(table.rank.tolist(), table.request.tolist(), table.ids.tolist(), strict=True)
    counted = Counter((*pair, one) for *pair, ids in pairs for one in ids)
    expected = [(*key, tokens) for key, tokens in counted.items()]
    same(shown, pd.DataFrame(expected, columns=["rank", "request", "expert", "tokens"]))


def from_a_store(shown: pd.DataFrame | None, case: Case) -> None:
    table = case.sample.layers(breakdown=True)
    phases = table[(table.phase != "all") & (table.tag == "all")].dropna(subset=["tokens"])
    assert shown is not None
    same(shown.rename(columns={"tokens_sum": "tokens"}), phases)


def to_csv(shown: pd.DataFrame | None, case: Case) -> None:
    written = Path("experts.csv")
    same(pd.read_csv(written), experts(case.sample))
    written.unlink()  # the next block writes its own


CHECKS: dict[str, Callable[[pd.DataFrame | None, Case], None]] = {
    "Open it": lambda shown, case: None,
    "Assignments by layer and expert, and the imbalance": assignments,
    "By phase and tag": by_phase_and_tag,
    "One layer over time": over_time,
    "The hottest experts of some seconds": hottest,
    "Steps, with their rank and their window": of_steps,
    "Expert ids of tokens": of_tokens,
    "From an object store, without a copy": from_a_store,
    "To CSV": to_csv,
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_block_says_what_routeprof_says(
    name: str, tmp_path: Path, recorded: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / SAMPLE).parent.mkdir(parents=True)
    RECORDINGS[name](tmp_path).rename(tmp_path / SAMPLE)
    shutil.copytree(recorded, tmp_path / DEMO)
    shutil.rmtree(server.folder / "bucket", ignore_errors=True)
    server.upload(tmp_path / SAMPLE, "bucket/runs/healthy")
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    case = Case(name, routeprof.load(SAMPLE), routeprof.load(DEMO))
    session = Session()
    for block in blocks():
        CHECKS[block.heading](session.run(block), case)


def test_every_recipe_is_run():
    found = list(blocks())
    assert {block.heading for block in found} == set(CHECKS)
    assert {block.language for block in found} == {"sql", "python"}
    assert PAGE.count("```") == 2 * len(found)
