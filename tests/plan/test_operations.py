"""Activations against operations that are followed one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from routeprof.plan.activations import Routed, mixer_numbers, mlp_numbers, moe_numbers
from routeprof.plan.model import load_model
from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
)
from routeprof.whatif.layout import Layout
from tests.plan.test_activations import ALONE, least

Operation = tuple[str, str]  # what it reads and what it makes, names with spaces between
Sizes = dict[str, int]


def simulated(sizes: Sizes, operations: list[Operation]) -> int:
    """Most numbers alive: at each operation what it reads and makes, and what is read later."""
    most, known = 0, {"x"}
    for at, (reads, makes) in enumerate(operations):
        known |= set(makes.split())
        later = {name for names, _ in operations[at + 1 :] for name in names.split()}
        alive = {*reads.split(), *makes.split()} | (known & later)
        most = max(most, sum(sizes[name] for name in alive))
    return most


def of_mlp(mlp: Mlp, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    inner = -(-mlp.width // tp)
    if mlp.gated:
        sizes = {"x": hidden, "both": 2 * inner, "one": inner, "own": hidden}
        return sizes, [("x", "both"), ("both", "one"), ("one", "own")]
    return {"x": hidden, "one": inner, "own": hidden}, [("x", "one"), ("one", "own")]


def of_attention(mixer: Attention, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    out, keys = (-(-heads // tp) * mixer.head for heads in (mixer.heads, mixer.kv_heads))
    sizes = {"x": mixer.inputs or hidden, "out": out, "y": hidden}
    sizes["qkv"] = out + (out if mixer.gated else 0) + keys + keys
    return sizes, [("x", "qkv"), ("qkv", "out"), ("out", "y")]


def of_latent(mixer: LatentAttention, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    heads = -(-mixer.heads // tp)
    sizes = {"x": hidden, "y": hidden, "qa": mixer.q_rank or 0}
    sizes |= {"c": mixer.kv_rank, "r": mixer.rope, "kv": heads * (mixer.nope + mixer.value)}
    sizes |= dict.fromkeys(("q", "k"), heads * (mixer.nope + mixer.rope))
    sizes["out"] = heads * mixer.value
    first = [("x", "qa c r"), ("qa", "q")] if mixer.q_rank else [("x", "q c r")]
    return sizes, [*first, ("c", "kv"), ("kv r", "k"), ("q k kv", "out"), ("out", "y")]


def of_mamba(mixer: Mamba, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    inner = -(-mixer.inner // tp)
    sizes = {"x": hidden, "xz": 2 * inner, "conv": inner, "dt": inner, "y": hidden}
    sizes["dbc"] = mixer.dt_rank + 2 * mixer.state
    first = [("x", "xz"), ("xz", "conv"), ("conv", "dbc"), ("dbc", "dt")]
    return sizes, [*first, ("conv dbc dt xz", "xz"), ("xz", "y")]


def of_state(mixer: Mamba2 | GatedDeltaNet, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    if isinstance(mixer, Mamba2):
        heads = -(-mixer.heads // tp)
        shared, each = 2 * -(-mixer.groups // tp) * mixer.state, heads
        out = heads * mixer.head
    else:
        heads = -(-mixer.value_heads // tp)
        shared, each = 2 * -(-mixer.key_heads // tp) * mixer.key, 2 * heads
        out = heads * mixer.value
    sizes = {"x": hidden, "p": shared + 2 * out + each, "conv": shared + out}
    sizes |= {"out": out, "y": hidden}
    gated = [("p out", "out"), ("out", "y")]
    return sizes, [("x", "p"), ("p", "conv"), ("p conv", "out"), *gated]


def of_lightning(mixer: LightningAttention, hidden: int, tp: int) -> tuple[Sizes, list[Operation]]:
    inner = -(-mixer.heads // tp) * mixer.head
    sizes = {"x": hidden, "qkv": 3 * inner, "out": inner, "gate": inner, "y": hidden}
    return sizes, [
        ("x", "qkv"),
        ("qkv", "out"),
        ("x", "gate"),
        ("out gate", "out"),
        ("out", "y"),
    ]


OF: dict[type, Any] = {
    Attention: of_attention,
    LatentAttention: of_latent,
    Mamba: of_mamba,
    Mamba2: of_state,
    GatedDeltaNet: of_state,
    LightningAttention: of_lightning,
}


def of_experts(moe: Moe, hidden: int, at: Routed) -> tuple[Sizes, list[list[Operation]]]:
    """In both orders, with the shared expert before or after the routed ones."""
    inner, wide = -(-moe.width // at.etp), moe.latent or hidden
    sizes = {"x": at.tokens * hidden, "y": at.tokens * hidden, "buffer": 0}
    sizes |= {"logits": at.tokens * moe.experts, "read": at.tokens * wide}
    sizes |= {"sum": at.tokens * wide, "down": at.rows * wide, "act": at.rows * inner}
    sizes["up"] = at.rows * inner * (2 if moe.gated else 1)
    source = "read" if moe.latent else "x"
    total = "sum" if moe.latent else "y"
    start: list[Operation] = [("x", "logits")]
    start += [("x", "read")] if moe.latent and at.sent else []
    start += [(source, "buffer")] if at.sent else []
    routed: list[Operation] = [("x", "read")] if moe.latent and not at.sent else []
    routed.append(("buffer" if at.sent else source, "up" if moe.gated else "act"))
    routed += [("up", "act")] if moe.gated else []
    routed += [("act", "down"), ("down", "buffer" if at.sent else total)]
    back: list[Operation] = []
    if at.sent and (moe.latent or not moe.shared):
        back.append(("buffer", total))
    back += [("sum", "y")] if moe.latent else []
    if moe.shared is None:
        return sizes, [[*start, *routed, *back]]
    own, shared = of_mlp(moe.shared, hidden, at.tp)
    sizes |= {name: at.tokens * count for name, count in own.items()}
    back.append(("own y" if moe.latent or not at.sent else "own buffer", "own"))
    if at.sent:
        return sizes, [[*start, *shared, *routed, *back], [*start, *routed, *shared, *back]]
    return sizes, [
        [*start, *shared, *routed, *back],
        [*start, *routed, *back[:-1], *shared, back[-1]],
    ]


@pytest.mark.parametrize(
    ("layout", "rows", "sent"),
    [
        (ALONE, 8, False),
        (Layout(4, 1, 4, 1), 2, False),
        (Layout(4, 1, 1, 4), 8, False),
        (Layout(2, 2, 4, 1), 4, True),
        (Layout(1, 4, 2, 2), 16, True),
    ],
    ids=str,
)
def test_a_pass_holds_the_widest_part(layout: Layout, rows: int, sent: bool) -> None:
    """Each part alone; so many rows for each token of a replica, in items of 4 bytes."""
    model = load_model("deepseek-v3")
    assert model.shape is not None
    at = Routed(100, 100 * rows, layout.tp, layout.etp, sent)
    for layer in (model.shape.layers[0], model.shape.layers[-1]):
        assert isinstance(layer.mixer, LatentAttention)
        widest = 100 * simulated(*of_latent(layer.mixer, model.hidden, layout.tp))
        attends = replace(model, shape=replace(model.shape, layers=(replace(layer, mlp=None),)))
        assert least(attends, 100, 4.0, layout) == 4 * (100 * model.hidden + widest)
        if isinstance(layer.mlp, Moe):
            sizes, orders = of_experts(layer.mlp, model.hidden, at)
            widest = min(simulated(sizes, one) for one in orders)
        else:
            assert layer.mlp
            widest = 100 * simulated(*of_mlp(layer.mlp, model.hidden, layout.tp))
        alone = replace(model, shape=replace(model.shape, layers=(replace(layer, mixer=None),)))
        assert least(alone, 100, 4.0, layout) == 4 * (100 * model.hidden + widest)


def test_zamba2_keeps_the_embeddings() -> None:
    """The shared attention reads them beside the residual in every block."""
    model = load_model("zamba2-7b")
    assert model.shape is not None
    block = next(layer.block for layer in model.shape.layers if layer.block)
    parts = [of_mlp(block.mlp, model.hidden, 1)]
    for layer in model.shape.layers:
        parts += [OF[type(mixer)](mixer, model.hidden, 1) for mixer in layer.mixers]
    widest = max(simulated(*part) for part in parts)
    assert least(model, 100, 2.0) == 2 * 100 * (2 * model.hidden + widest)


small = st.integers(1, 40)
mixers = st.one_of(
    st.builds(
        Attention,
        heads=small,
        kv_heads=small,
        head=small,
        inputs=st.one_of(st.none(), small),
        gated=st.booleans(),
    ),
    st.builds(
        LatentAttention,
        heads=small,
        q_rank=st.one_of(st.none(), small),
        kv_rank=small,
        nope=small,
        rope=small,
        value=small,
    ),
    st.builds(Mamba, inner=small, state=small, conv=small, dt_rank=small),
    st.builds(Mamba2, heads=small, head=small, groups=small, state=small, conv=small),
    st.builds(
        GatedDeltaNet, key_heads=small, value_heads=small, key=small, value=small, conv=small
    ),
    st.builds(LightningAttention, heads=small, head=small),
)
mlps = st.builds(Mlp, width=small, gated=st.booleans())


@given(mixer=mixers, hidden=st.integers(1, 300), tp=st.sampled_from([1, 2, 3]))
# What is compressed is the most: that of queries, and that of keys and values.
@example(mixer=LatentAttention(1, q_rank=40, kv_rank=40, nope=1, rope=1, value=1), hidden=1, tp=1)
@example(mixer=LatentAttention(1, q_rank=1, kv_rank=40, nope=1, rope=1, value=1), hidden=1, tp=1)
@example(mixer=Attention(1, 1, 1, inputs=1), hidden=9, tp=1)  # only the last matrix is wide
@settings(deadline=None, max_examples=300)
def test_mixers_hold_what_their_operations_do(mixer: Mixer, hidden: int, tp: int) -> None:
    assert mixer_numbers(mixer, hidden, tp) == simulated(*OF[type(mixer)](mixer, hidden, tp))


@given(mlp=mlps, hidden=st.integers(1, 300), tp=st.sampled_from([1, 2, 3]))
@settings(deadline=None)
def test_mlps_hold_what_their_operations_do(mlp: Mlp, hidden: int, tp: int) -> None:
    assert mlp_numbers(mlp, hidden, tp) == simulated(*of_mlp(mlp, hidden, tp))


@given(
    moe=st.builds(
        Moe,
        experts=small,
        top_k=st.just(2),
        width=small,
        gated=st.booleans(),
        shared=st.one_of(st.none(), mlps),
        latent=st.one_of(st.none(), small),
    ),
    hidden=st.integers(1, 100),
    at=st.builds(
        Routed,
        tokens=small,
        rows=st.one_of(st.integers(0, 20), st.integers(0, 200)),
        tp=st.sampled_from([1, 2]),
        etp=st.sampled_from([1, 2, 3]),
        sent=st.booleans(),
    ),
)
# A latent that is kept is the most; a shared expert is better first; it is the most alone.
@example(moe=Moe(2, 2, 12, shared=Mlp(1), latent=10), hidden=1, at=Routed(10, 5, 1, 1, sent=False))
@example(moe=Moe(2, 2, 1, shared=Mlp(8)), hidden=10, at=Routed(1, 1, 1, 1, sent=False))
@example(moe=Moe(2, 2, 1, shared=Mlp(8)), hidden=10, at=Routed(10, 1, 1, 1, sent=True))
@settings(deadline=None, max_examples=300)
def test_experts_hold_what_their_operations_do(moe: Moe, hidden: int, at: Routed) -> None:
    sizes, orders = of_experts(moe, hidden, at)
    assert moe_numbers(moe, hidden, at) == min(simulated(sizes, one) for one in orders)
