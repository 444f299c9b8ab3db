"""What capture costs, as ratios measured in one run: ``python -m tests.bench capture``.

With and without capture alternate pass by pass, so that a slow minute hits both; the ratio is of
medians, and its spread is shown. Absolute times are kept only to say what the ratios are of.
"""

from __future__ import annotations

import argparse
import functools
import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

import routeprof
from routeprof.hooks.discovery import LayerSpec
from routeprof.topology import LEVELS
from tests.bench.kept import Figure, figure

DECODE_BATCH, DECODE_CONTEXT = 16, 128
PREFILL_BATCH, PREFILL_LENGTH = 4, 256
DISK_STEPS = 512


def build() -> Qwen3MoeForCausalLM:
    """A small model of Qwen3-MoE's shape: 12 layers, 64 experts, top-8, 76 M parameters."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
    )
    return Qwen3MoeForCausalLM(config).eval()


@contextmanager
def captured(model: nn.Module, **options: object) -> Iterator[Path]:
    """The model with a recording attached; yields its directory."""
    folder = Path(tempfile.mkdtemp(prefix="routeprof-bench-"))
    try:
        with routeprof.record(model, folder / "recording", **options):  # type: ignore[arg-type]
            yield folder / "recording"
    finally:
        shutil.rmtree(folder)


def decode_pass(model: Qwen3MoeForCausalLM) -> Callable[[], float]:
    """Times one decode step at a fixed context; the cache is cut back after each."""
    cache = DynamicCache(config=model.config)
    context = torch.randint(0, 1024, (DECODE_BATCH, DECODE_CONTEXT))
    model(context, past_key_values=cache)
    tokens = torch.randint(0, 1024, (64, DECODE_BATCH, 1))
    state = {"step": 0}

    def step() -> float:
        state["step"] += 1
        start = perf_counter()
        model(tokens[state["step"] % 64], past_key_values=cache)
        elapsed = perf_counter() - start
        cache.crop(-1)
        return elapsed

    return step


def prefill_pass(model: Qwen3MoeForCausalLM) -> Callable[[], float]:
    """Times one prefill of a padded batch."""
    tokens = torch.randint(0, 1024, (PREFILL_BATCH, PREFILL_LENGTH))
    mask = torch.ones_like(tokens)
    mask[0, : PREFILL_LENGTH // 4] = 0

    def step() -> float:
        start = perf_counter()
        model(tokens, attention_mask=mask, use_cache=False)
        return perf_counter() - start

    return step


def compare(
    model: Qwen3MoeForCausalLM,
    step: Callable[[], float],
    rounds: int,
    block: int,
    **options: object,
) -> list[float]:
    """Throughput with capture ÷ without, of each round.

    Blocks of passes with and without capture alternate; each pair gives one ratio.
    """
    ratios, base = [], []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        plain = statistics.median(step() for _ in range(block))
        with captured(model, **options):
            for _ in range(max(1, block // 10)):  # a compiled model is traced anew
                step()
            hooked = statistics.median(step() for _ in range(block))
        step()
        again = statistics.median(step() for _ in range(block))
        base.append((plain + again) / 2)
        ratios.append(base[-1] / hooked)
    gc.enable()
    return ratios


LEVELS_MEASURED: dict[str, dict[str, object]] = {
    "windows, counts and gate": {"level": "windows"},
    "windows, counts only": {"level": "windows", "gate": False},
    "steps, counts and gate": {"level": "steps"},
    "tokens, counts and gate": {"level": "tokens"},
}
PROMISED = ("decode", "windows, counts and gate")
PHASES = {
    "decode": (decode_pass, 60, f"decode, {DECODE_BATCH} sequences"),
    "prefill": (prefill_pass, 3, f"prefill, {PREFILL_BATCH} × {PREFILL_LENGTH} tokens"),
}


def throughput(rounds: int, *, compiled: bool = False) -> Iterator[Figure]:
    """Ratios of throughput with capture to that without, and what they are ratios of."""
    for phase, (make, block, column) in PHASES.items():
        model = build()
        step = make(torch.compile(model) if compiled else model)
        for _ in range(block):
            step()
        base = [1e3 * step() for _ in range(block)]
        yield figure("pass", "without capture", column, base, unit="ms", digits=1)
        for name, options in LEVELS_MEASURED.items():
            target = 0.97 if (phase, name) == PROMISED and not compiled else None
            ratios = compare(model, step, rounds, block, **options)
            yield figure("throughput", name, column, ratios, better="higher", target=target)


class BareCount(nn.Module):
    """A layer that does nothing, to hang one hook on."""

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the ids."""
        return ids


def layer_call(rounds: int) -> Iterator[Figure]:
    """The cost of one layer call against a hook with a bare scatter_add_."""
    for tokens in (1, 16, 128, 1024, 4096):
        ids = torch.randint(0, 64, (tokens, 8))
        calls = max(200, 20_000 // tokens)
        ratios = _layer_ratio(ids, calls, rounds)
        options: dict[str, Any] = {"digits": 1, "better": "lower", "target": 2.0}
        yield figure("call", "ratio", f"{tokens:,} tokens", ratios, **options)


def _layer_ratio(ids: Tensor, calls: int, rounds: int) -> list[float]:
    layers = 24
    plain, bare, ours = _Stack(layers), _Stack(layers), _Stack(layers)
    ones = torch.ones(ids.numel(), dtype=torch.int64)
    for layer in bare.layers:
        row = torch.zeros(64, dtype=torch.int64)
        layer.register_forward_hook(functools.partial(_scatter, row, ones))
    spec = LayerSpec(experts=64, top_k=8, read=lambda module, args, kwargs, output: output)
    named = {f"layers.{number}": spec for number in range(layers)}
    ratios = []
    passes = max(5, calls // layers)
    with captured(ours, gate=False, layers=named):
        for _ in range(rounds):
            empty = _time(plain, ids, passes)
            ratios.append((_time(ours, ids, passes) - empty) / (_time(bare, ids, passes) - empty))
    return ratios


def _scatter(row: Tensor, ones: Tensor, module: nn.Module, args: object, ids: Tensor) -> None:
    row.scatter_add_(0, ids.view(-1), ones)


def _time(stack: nn.Module, ids: Tensor, passes: int) -> float:
    tokens = ids[:, :1].T
    start = perf_counter()
    for _ in range(passes):
        stack(tokens, ids)
    return perf_counter() - start


class _Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BareCount() for _ in range(layers))

    def forward(self, input_ids: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            ids = layer(ids)
        return ids


def disk() -> Iterator[Figure]:
    """Bytes on disk per token for each level."""
    model = build()
    step = decode_pass(model)
    prompt = torch.randint(0, 1024, (PREFILL_BATCH, PREFILL_LENGTH))
    tokens = prompt.numel() + DISK_STEPS * DECODE_BATCH
    for level in LEVELS:
        with tempfile.TemporaryDirectory(prefix="routeprof-bench-") as folder:
            with routeprof.record(model, Path(folder) / "recording", level=level):
                model(prompt, use_cache=False)
                for _ in range(DISK_STEPS):
                    step()
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        # Parts end with time, and each has a foot, so that a slow run has more of them.
        size /= tokens
        yield figure("bytes", "bytes a token", level, size, unit="B", digits=0, better="lower")


METHODS = {
    "capture": "{rounds} rounds of passes with and without capture in turns.",
    "compiled": "The same with `torch.compile`, {rounds} rounds.",
    "layer_call": "{rounds} rounds.",
    "disk": "One recording of each level.",
}


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """Each suite's name, how it was measured, and its figures."""
    parser = argparse.ArgumentParser(prog="make bench ARGS='capture …'", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(METHODS), help="leave the others out")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "capture": lambda: throughput(rounds),
        "compiled": lambda: throughput(rounds, compiled=True),
        "layer_call": lambda: layer_call(rounds),
        "disk": disk,
    }
    with torch.inference_mode():
        for name, part in parts.items():
            if chosen.only in (None, name):
                method = METHODS[name].format(rounds=rounds)
                threads = f" {torch.get_num_threads()} threads."
                yield name, method + threads, list(part())
