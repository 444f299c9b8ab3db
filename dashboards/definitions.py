"""What each number means: the one place where the page's names, units and definitions are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["count", "ratio", "share", "number", "text", "seconds"]


@dataclass(frozen=True)
class Definition:
    """A column or key figure.

    Attributes:
        label: its name on the page, with the unit where it has one.
        kind: how its values are written.
        text: what it means, in a sentence or two.
    """

    label: str
    kind: Kind
    text: str


DEFINITIONS: dict[str, Definition] = {
    "layer": Definition("Layer", "count", "Index of the MoE layer in the model."),
    "layer_name": Definition("Module", "text", "Path of the module in the model."),
    "expert": Definition("Expert", "count", "Index of the routed expert within its layer."),
    "state": Definition(
        "State",
        "text",
        "captured: counted. silent: the model ran but the layer's hook did not, its counts are "
        "unknown. unsupported: the router cannot be read. idle: no pass reached it.",
    ),
    "steps": Definition("Steps", "count", "Forward passes of the engine."),
    "tokens": Definition("Tokens", "count", "Tokens that the layer routed; padding is left out."),
    "expert_tokens": Definition("Tokens", "count", "Assignments that the expert received."),
    "assignments": Definition(
        "Assignments", "count", "(token, chosen expert) pairs: tokens × top-k."
    ),
    "invalid": Definition(
        "Invalid ids", "count", "Assignments whose id names no expert of the layer."
    ),
    "coverage": Definition(
        "Coverage",
        "share",
        "Captured assignments ÷ assignments that the engine made. Below 100 % the other numbers "
        "are of a part only.",
    ),
    "imbalance_ratio": Definition(
        "Imbalance (max / mean)",
        "ratio",
        "Load of the hottest expert ÷ mean load, experts without tokens included. 1 is perfect; "
        "the number of experts is collapse onto one.",
    ),
    "balancedness": Definition(
        "Balancedness (mean / max)", "ratio", "Mean load ÷ load of the hottest expert; 1 is best."
    ),
    "step_imbalance_p50": Definition(
        "Step imbalance p50",
        "ratio",
        "Median of the per-step max / mean, weighted by tokens. An even hour can consist of "
        "skewed steps, and the engine waits in each of them.",
    ),
    "step_imbalance_p95": Definition(
        "Step imbalance p95",
        "ratio",
        "95th percentile of the per-step max / mean, weighted by tokens.",
    ),
    "step_imbalance_max": Definition(
        "Step imbalance max", "ratio", "Largest max / mean of any step."
    ),
    "effective_experts": Definition(
        "Effective experts",
        "number",
        "exp of the entropy of the load: as many equally used experts would be as diverse.",
    ),
    "dead_experts": Definition(
        "Dead experts", "count", "Experts without a single token in what is selected."
    ),
    "top2_share": Definition(
        "Top-2 share", "share", "Share of the assignments that the two hottest experts take."
    ),
    "hottest_expert": Definition("Hottest expert", "count", "Expert with the most tokens."),
    "share": Definition("Share", "share", "Expert's share of the layer's assignments."),
    "load_over_mean": Definition(
        "Load / mean", "ratio", "Tokens of the expert ÷ mean tokens of the layer's experts."
    ),
    "probability_mass": Definition(
        "Gate mass",
        "share",
        "Mean over tokens of the probability that the router gives the expert, chosen or not.",
    ),
    "mean_weight": Definition(
        "Mean weight", "number", "Mean combine weight of the expert where it was chosen."
    ),
    "aux_loss": Definition(
        "Aux loss", "ratio", "E · Σ load share × gate mass (Switch, GShard); 1 is balanced."
    ),
    "gate_entropy": Definition(
        "Gate entropy, nats", "number", "Mean entropy of the router's probabilities of a token."
    ),
    "top1_probability": Definition(
        "Top-1 probability", "share", "Mean probability of the router's first choice."
    ),
    "small_gemm_share": Definition(
        "Small GEMMs",
        "share",
        "Share of the (expert, step) matrix products with fewer than 16 tokens, one tensor-core "
        "tile: they are bound by reading the weights.",
    ),
    "gemm_tokens": Definition(
        "Tokens per GEMM", "text", "Tokens that one expert gets in one step, in doubling ranges."
    ),
    "cells": Definition("GEMMs", "count", "(expert, step) pairs in which the expert had tokens."),
    "capacity_factor": Definition(
        "Capacity factor",
        "number",
        "f in capacity = ⌈f · tokens · top-k ÷ experts⌉, the slots an expert has in a step.",
    ),
    "overflow_rate": Definition(
        "Overflow rate",
        "share",
        "Assignments above the capacity of their expert, step by step, ÷ all assignments.",
    ),
    "overflow_worst": Definition(
        "Overflow, worst layer", "share", "Overflow rate of the layer in which it is largest."
    ),
    "overflow_steps": Definition(
        "Steps with overflow",
        "share",
        "Share of the steps, counted in each layer, in which at least one expert overflows.",
    ),
    "overflow_assignments": Definition(
        "Overflow", "count", "Assignments above the capacity of their expert, summed over steps."
    ),
    "padding_rate": Definition(
        "Padding rate", "share", "Slots that are paid for and stay empty ÷ all slots."
    ),
    "steps_with_overflow": Definition(
        "Steps with overflow", "count", "Steps in which at least one expert overflowed."
    ),
    "time": Definition("Time, s", "number", "Seconds since the first window began."),
    "token_rate": Definition(
        "Tokens/s", "number", "Tokens that a layer routed ÷ the time that its windows cover."
    ),
    "imbalance_worst": Definition("Worst layer", "ratio", "Largest imbalance of any layer."),
    "imbalance_median": Definition("Median layer", "ratio", "Median imbalance over the layers."),
    "imbalance_layer": Definition("Chosen layer", "ratio", "Imbalance of the chosen layer."),
    "step_tokens": Definition(
        "Tokens in such steps", "count", "Tokens of the steps whose imbalance is in the range."
    ),
    "from": Definition("From", "ratio", "Lower end of the range."),
    "own_cost": Definition(
        "Own cost",
        "share",
        "Time that routeprof's hooks took in the engine's thread ÷ time of the steps.",
    ),
    "rank": Definition("Rank", "count", "Process of the parallel group."),
    "rank_state": Definition("State", "text", "What the rank's last sign of life said."),
    "cost_seconds": Definition("Own time, s", "number", "Time of our hooks in the engine."),
    "busy_seconds": Definition("Step time, s", "number", "Time of the steps measured."),
    "age": Definition("Last sign of life", "text", "When the rank wrote last."),
    "problems": Definition("Problems", "text", "What was lost or went wrong on this rank."),
    "captured_layers": Definition(
        "Layers captured", "text", "MoE layers that were counted, of those that the model has."
    ),
}


def definition(name: str) -> Definition:
    """The definition of a column; an unknown one stands for itself."""
    return DEFINITIONS.get(name, Definition(name, "text", ""))
