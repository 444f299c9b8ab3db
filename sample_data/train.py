"""Train the sample: a small Qwen3-MoE on four kinds of text, in minutes on two cores."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeprof.sample_data import BOS_ID, EOS_ID, PAD_ID, VOCABULARY
from routeprof.sample_data.corpus import Corpus, load_corpus

COLLAPSED_COEFFICIENT = 0.001
"""The usual weight of transformers' own balance loss, too small to keep this model balanced."""


@dataclass(frozen=True)
class Recipe:
    """How to train; a batch holds the same number of windows of each kind."""

    steps: int = 1500
    windows: int = 8
    length: int = 256
    learning_rate: float = 1e-3
    balance: float = 0.01
    collapsed: bool = False
    seed: int = 0


def build_model() -> Qwen3MoeForCausalLM:
    """The untrained model, about 2.6 million parameters."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        router_aux_loss_coef=COLLAPSED_COEFFICIENT,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen3MoeForCausalLM(config)


def as_bytes(corpus: Corpus) -> list[Tensor]:
    """One long row of byte ids per kind."""
    return [
        torch.frombuffer(bytearray("".join(texts).encode("utf-8")), dtype=torch.uint8)
        for texts in corpus.values()
    ]


def batches(streams: list[Tensor], recipe: Recipe) -> Iterator[Tensor]:
    """Windows from random places, as many of each kind."""
    generator = torch.Generator().manual_seed(recipe.seed)
    each = recipe.windows // len(streams)
    for _ in range(recipe.steps):
        rows = [
            stream[start : start + recipe.length]
            for stream in streams
            for start in torch.randint(len(stream) - recipe.length, (each,), generator=generator)
        ]
        yield torch.stack(rows).long()


def layer_balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """E · Σ f·P of each layer, summed: 1 a layer when that layer is balanced.

    An average over all layers would let one layer's skew hide behind another's.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        experts = probabilities.shape[-1]
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=experts) / chosen.numel()
        losses.append(experts * (share * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).sum()


def train(recipe: Recipe, corpus: Corpus) -> Qwen3MoeForCausalLM:
    """Train a model by the recipe and print its text loss now and then."""
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps
    )
    began = time.perf_counter()
    for step, ids in enumerate(batches(as_bytes(corpus), recipe), 1):
        output = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        # The model has already added transformers' own balance loss to output.loss.
        own = COLLAPSED_COEFFICIENT * output.aux_loss
        text_loss = output.loss - own
        layers = layer_balance_loss(output.router_logits, model.config.num_experts_per_tok)
        loss = text_loss + (own if recipe.collapsed else recipe.balance * layers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == recipe.steps:
            seconds = time.perf_counter() - began
            print(f"step {step:5}  loss {text_loss.item():.3f}  {seconds:.0f} s", flush=True)
    return model.eval()


def parse_arguments() -> tuple[Recipe, Path, int]:
    """The recipe, the folder for the model and the number of threads, from the command line."""
    default = Recipe()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--windows", type=int, default=default.windows, help="windows a batch")
    parser.add_argument("--length", type=int, default=default.length, help="bytes a window")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--balance", type=float, default=default.balance)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--collapsed", action="store_true", help="train a model that collapses")
    given = parser.parse_args()
    recipe = Recipe(
        steps=given.steps,
        windows=given.windows,
        length=given.length,
        learning_rate=given.learning_rate,
        balance=given.balance,
        collapsed=given.collapsed,
        seed=given.seed,
    )
    return recipe, given.out, given.threads


def main() -> None:
    """Train and save, in bfloat16."""
    recipe, out, threads = parse_arguments()
    torch.set_num_threads(threads)
    corpus, _ = load_corpus()
    train(recipe, corpus).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main()
