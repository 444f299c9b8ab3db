"""Predictions of layouts against loops over the tokens of a real recording."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.profile import Profile
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.whatif.cost import Sizes
from routeprof.whatif.hardware import Hardware
from routeprof.whatif.layout import Layout, layouts
from routeprof.whatif.layout_sums import Setting
from routeprof.whatif.layouts import predict
from routeprof.whatif.sizes import expert_bytes, sizes_of
from tests.commands.conftest import MIXTRAL
from tests.dashboards.tokens import record_tokens

GPU = Hardware(flops=1e9, flops_8bit=1e9, memory=1e8, inside=1e7, between=1e6, latency=1e-4)
EXPERTS, HIDDEN, WIDTH = 8, 32, 16


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("layouts")
    return routeprof.load(record_tokens(folder / "run", "a", "b", rows=3, tokens=11))


def setting(profile: Profile, **options: object) -> Setting:
    return Setting(sizes_of(profile), GPU, **options)  # type: ignore[arg-type]


def by_hand(profile: Profile, layout: Layout) -> dict[str, float]:
    """All figures of a layout with experts in order, token by token."""
    per_rank, gpus, nodes = EXPERTS // layout.ep, layout.gpus, layout.nodes
    per_node, part = gpus // nodes, 3 * HIDDEN * WIDTH / layout.etp
    token_bytes = HIDDEN * 4
    sums = dict.fromkeys(
        "slowest mean assignments gemms small tokens ranks nodes dispatch_inside dispatch_between "
        "combine_inside combine_between attention dispatch experts combine".split(),
        0.0,
    )
    steps = 0
    for layer in profile.layer_indices:
        table = profile.tokens(layer)
        requests = sorted(set(table.request.tolist()))
        steps = len(set(table.step.tolist()))
        for step in sorted(set(table.step.tolist())):
            rows = np.flatnonzero(table.step == step)
            loads = [0] * EXPERTS
            sent = np.zeros((gpus, gpus))
            in_replica = [0] * layout.dp
            for row in rows:
                ids = table.ids[row].tolist()
                replica = requests.index(int(table.request[row])) % layout.dp
                home = replica * layout.tp + in_replica[replica] % layout.tp
                in_replica[replica] += 1
                ranks = {expert // per_rank for expert in ids}
                targets = {rank * layout.etp + one for rank in ranks for one in range(layout.etp)}
                for expert in ids:
                    loads[expert] += 1
                for target in targets - {home}:
                    sent[home, target] += layout.dp > 1
                sums["ranks"] += len(ranks)
                sums["nodes"] += len({target // per_node for target in targets})
            sums["tokens"] += len(rows)
            of_ranks = np.array(loads).reshape(layout.ep, per_rank).sum(axis=1)
            sums["slowest"] += of_ranks.max()
            sums["mean"] += of_ranks.mean()
            sums["assignments"] += sum(loads)
            sums["gemms"] += sum(load > 0 for load in loads)
            sums["small"] += sum(0 < load < 16 for load in loads)
            sums["experts"] += max(
                sum(
                    max(2 * part * load / GPU.flops, part * 4 / GPU.memory)
                    for load in loads[rank * per_rank : (rank + 1) * per_rank]
                    if load
                )
                for rank in range(layout.ep)
            )
            inside = np.arange(gpus)[:, None] // per_node == np.arange(gpus) // per_node
            busiest = max(
                (np.where(mine, sent, 0).sum(axis=axis) * token_bytes / rate).max()
                for mine, rate in ((inside, GPU.inside), (~inside, GPU.between))
                for axis in (0, 1)
            )
            if layout.dp > 1:
                for way in ("dispatch", "combine"):
                    sums[way] += busiest + (GPU.latency if busiest else 0)
                    sums[f"{way}_inside"] += sent[inside].sum() * token_bytes
                    sums[f"{way}_between"] += sent[~inside].sum() * token_bytes
            else:
                sums["combine"] += all_reduce(layout, gpus, len(rows) * token_bytes)
                inner, outer = ring(layout, gpus)
                sums["combine_inside"] += inner * gpus * len(rows) * token_bytes
                sums["combine_between"] += outer * gpus * len(rows) * token_bytes
            if layout.tp > 1:
                sums["attention"] += all_reduce(layout, layout.tp, max(in_replica) * token_bytes)
    return sums | {"steps": steps}


def ring(layout: Layout, gpus: int) -> tuple[float, float]:
    """Of the whole, what each GPU sends inside its node and to others."""
    here = min(gpus, layout.gpus // layout.nodes)
    nodes = gpus // here
    return 2 * (here - 1) / here, 2 * (nodes - 1) / nodes / here


def all_reduce(layout: Layout, gpus: int, size: float) -> float:
    inner, outer = ring(layout, gpus)
    return size * (inner / GPU.inside + outer / GPU.between) + GPU.latency


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_figure_of_every_layout(profile: Profile, gpus: int, nodes: int):
    made = predict(profile, layouts(gpus, EXPERTS, nodes), setting(profile))
    assert len(made.rows) == len({row.layout for row in made.rows}) > 3
    assert made.traffic
    assert made.every == 1
    for row in made.rows:
        sums = by_hand(profile, row.layout)
        steps = made.steps
        assert steps == sums["steps"]
        per_step = {
            name: sums[name] / steps
            for name in ("dispatch_inside dispatch_between combine_inside combine_between".split())
        }
        times = {
            f"{name}_ms": sums[name] / steps * 1e3
            for name in ("attention", "dispatch", "experts", "combine")
        }
        expected = {
            "straggler_factor": sums["slowest"] / sums["mean"],
            "tokens_per_gemm": sums["assignments"] / sums["gemms"],
            "small_gemm_share": sums["small"] / sums["gemms"],
            "ranks_per_token": sums["ranks"] / sums["tokens"],
            "nodes_per_token": sums["nodes"] / sums["tokens"],
            "expert_bytes": 3 * EXPERTS // row.layout.ep * 3 * HIDDEN * WIDTH * 4 / row.layout.etp,
            **per_step,
            **times,
        }
        found = {name: value for name, value in asdict(row).items() if name != "layout"}
        assert found == pytest.approx(expected), row.layout
        assert row.total_ms == pytest.approx(sum(times.values()))
    totals = [row.total_ms for row in made.rows]
    assert totals == sorted(totals)


def test_relaying_sends_less_between_nodes_and_more_inside(profile: Profile):
    wanted = [Layout(1, 8, 8, 1, nodes=2)]
    (direct,) = predict(profile, wanted, setting(profile)).rows
    (relayed,) = predict(profile, wanted, setting(profile, relay=True)).rows
    assert relayed.dispatch_between < direct.dispatch_between
    assert relayed.dispatch_inside > direct.dispatch_inside


def test_placed_experts_are_judged_on_later_steps(profile: Profile):
    wanted = list(layouts(4, EXPERTS))
    first = predict(profile, wanted, setting(profile))
    for placing in ("eplb", "routeprof"):
        made = predict(profile, wanted, setting(profile, placing=placing, redundant=3))
        assert made.steps + made.fitted == first.steps
        by_layout = {row.layout: row for row in made.rows}
        largest = by_layout[Layout(1, 4, 4, 1)]
        # 8 experts and 3 replicas on 4 ranks: 3 slots each in each of 3 layers.
        assert largest.expert_bytes == 3 * 3 * 3 * HIDDEN * WIDTH * 4
        one = by_layout[Layout(1, 4, 1, 4)]
        assert one.straggler_factor == 1


def test_only_one_in_so_many_steps_of_much_work(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    tokens = int(profile.step_counts().tokens.sum())
    monkeypatch.setattr("routeprof.whatif.layer_runs.MOST_WORK", tokens)
    wanted = [Layout(1, 2, 2, 1), Layout(2, 1, 2, 1)]
    made = predict(profile, wanted, setting(profile))
    assert made.every == 2
    assert predict(profile, [Layout(16, 1, 1, 16)], setting(profile)).every == 3
    steps = len(np.unique(profile.step_counts().step))
    assert made.steps == -(-steps // 2)


def test_steps_alone_tell_loads_and_not_traffic(profile: Profile, tmp_path: Path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    ids = torch.randint(1, 60, (2, 9))
    for level in ("steps", "tokens"):
        with routeprof.record(model, tmp_path / level, level=level):
            model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    wanted = list(layouts(4, EXPERTS))
    steps, tokens = (
        predict(own, wanted, setting(own))
        for own in map(routeprof.load, (tmp_path / "steps", tmp_path / "tokens"))
    )
    assert not steps.traffic
    known = {row.layout: row for row in tokens.rows}
    for row in steps.rows:
        other = known[row.layout]
        for name in ("straggler_factor", "tokens_per_gemm", "small_gemm_share", "experts_ms"):
            assert getattr(row, name) == getattr(other, name)
        assert isnan(row.ranks_per_token)
        assert isnan(row.dispatch_ms) == (row.layout.dp > 1)
    unknown = [isnan(row.total_ms) for row in steps.rows]
    assert unknown == sorted(unknown)


def test_one_line_for_what_cannot_be(profile: Profile):
    sums = routeprof.load(RECORDINGS_DIR / "healthy")
    with pytest.raises(LevelRequiredError, match="level steps"):
        predict(sums, layouts(4, 16), setting(sums))
    with pytest.raises(UsageError, match="no layout fits"):
        predict(profile, [], setting(profile))
    with pytest.raises(UsageError, match="pass 0, or placement eplb"):
        setting(profile, redundant=2)
    with pytest.raises(UsageError, match="not one of contiguous"):
        setting(profile, placing="best")
    with pytest.raises(UsageError, match="pass a number of nodes that divides"):
        list(layouts(4, 8, 3))


def stored(profile: Profile, method: str, *, inside: bool = True, **facts: object) -> Profile:
    """As of a checkpoint whose configuration says how it is quantised, in its text part or not."""
    says = {"quantization_config": {"quant_method": method}}
    text = {"model_type": "mixtral"}
    config = {"text_config": text | says} if inside else {"text_config": text} | says
    model = replace(profile.info.model, config=config, **facts)  # type: ignore[arg-type]
    return replace(profile, info=replace(profile.info, model=model))


def test_weights_take_what_the_checkpoint_has_and_tokens_what_the_model_computes_in(
    profile: Profile,
):
    for inside in (True, False):
        eight = stored(profile, "fp8", inside=inside, dtype="bfloat16")
        assert sizes_of(eight) == Sizes(HIDDEN, WIDTH, 1, 2, 2)
    assert sizes_of(stored(profile, "fp8"), weight=2) == Sizes(HIDDEN, WIDTH, 2, 4, 4)
    assert expert_bytes(profile) == 4 * expert_bytes(stored(profile, "fp8")) == 12 * HIDDEN * WIDTH


def test_weights_of_another_kind_are_not_known(profile: Profile):
    other = stored(profile, "gptq")
    with pytest.raises(
        UsageError, match=r"^a weight in gptq has no known size: pass --weight-bytes$"
    ):
        sizes_of(other)
    assert sizes_of(other, weight=0.5) == Sizes(HIDDEN, WIDTH, 0.5, 4, 4)
    with pytest.raises(UsageError, match="pass --expert-bytes"):
        expert_bytes(other)
    with pytest.raises(UsageError, match=r"^int4 has no known size: pass --dispatch-bytes, --com"):
        sizes_of(stored(profile, "fp8", dtype="int4"))


def test_sizes_of_a_recording(profile: Profile):
    assert sizes_of(profile) == Sizes(HIDDEN, WIDTH, 4, 4, 4)
    told = sizes_of(profile, width=7, weight=1, dispatch=1, combine=2)
    assert told == Sizes(HIDDEN, 7, 1, 1, 2)
    with pytest.raises(UsageError, match="width of 1 or more"):
        sizes_of(profile, width=0)
    with pytest.raises(UsageError, match="up to 16 bytes"):
        sizes_of(profile, weight=-1)
