"""What capture costs, as ratios measured in one run: ``python -m tests.bench.capture``.

With and without capture alternate pass by pass, so that a slow minute hits both; the ratio is of
medians, and its spread is shown. Absolute times are printed only to say what the ratios are of.
"""

from __future__ import annotations

import argparse
import functools
import gc
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

import routeprof
from routeprof.hooks.discovery import LayerSpec
from routeprof.topology import LEVELS

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
) -> tuple[float, float, float]:
    """Throughput with capture ÷ without: median over blocks, and its quartiles.

    Blocks of passes with and without capture alternate; each pair gives one ratio.
    """
    ratios, base = [], []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        plain = statistics.median(step() for _ in range(block))
        with captured(model, **options):
            step()
            hooked = statistics.median(step() for _ in range(block))
        again = statistics.median(step() for _ in range(block))
        base.append((plain + again) / 2)
        ratios.append(base[-1] / hooked)
    gc.enable()
    quartiles = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), quartiles[0], quartiles[2]


def throughput(rounds: int) -> None:
    """Prints the table of throughput ratios."""
    model = build()
    rows = [
        ("counts and gate", {"level": "windows"}),
        ("counts only", {"level": "windows", "gate": False}),
        ("level steps", {"level": "steps"}),
        ("level tokens", {"level": "tokens"}),
    ]
    phases = (
        ("decode", decode_pass, 60, f"{DECODE_BATCH} sequences"),
        ("prefill", prefill_pass, 3, f"{PREFILL_BATCH} x {PREFILL_LENGTH} tokens"),
    )
    for phase, make, block, shape in phases:
        step = make(model)
        for _ in range(block):
            step()
        base = statistics.median(step() for _ in range(block))
        print(f"\n{phase} of {shape}: {base * 1e3:.1f} ms a pass without capture")
        for name, options in rows:
            middle, low, high = compare(model, step, rounds, block, **options)
            print(f"  {name:16} throughput x {middle:.3f}   (quartiles {low:.3f} to {high:.3f})")


class BareCount(nn.Module):
    """A layer that does nothing, to hang one hook on."""

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the ids."""
        return ids


def layer_call(rounds: int) -> None:
    """Prints the cost of one layer call against a hook with a bare scatter_add_."""
    print("\none layer call, counts only, against a hook that does a bare scatter_add_:")
    for tokens in (1, 16, 128, 1024, 4096):
        ids = torch.randint(0, 64, (tokens, 8))
        calls = max(200, 20_000 // tokens)
        print(f"  {tokens:5} tokens: x {_layer_ratio(ids, calls, rounds):.2f}")


def _layer_ratio(ids: Tensor, calls: int, rounds: int) -> float:
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
    return statistics.median(ratios)


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


def disk() -> None:
    """Prints bytes on disk per token for each level."""
    model = build()
    step = decode_pass(model)
    prompt = torch.randint(0, 1024, (PREFILL_BATCH, PREFILL_LENGTH))
    tokens = prompt.numel() + DISK_STEPS * DECODE_BATCH
    print(f"\nbytes on disk per token, 12 layers, top-8; {tokens} tokens, most of them decoded:")
    for level in LEVELS:
        with tempfile.TemporaryDirectory(prefix="routeprof-bench-") as folder:
            with routeprof.record(model, Path(folder) / "recording", level=level):
                model(prompt, use_cache=False)
                for _ in range(DISK_STEPS):
                    step()
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        print(f"  {level:8} {size / tokens:8.1f}")


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, numpy {numpy.__version__}"
    )
    with torch.inference_mode():
        throughput(rounds)
        layer_call(rounds)
        disk()


if __name__ == "__main__":
    main()
