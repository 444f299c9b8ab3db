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
    "margin": Definition(
        "Margin", "share", "Mean p(k) − p(k + 1): how near the choice of experts is to flipping."
    ),
    "router_z_loss": Definition(
        "Router z-loss", "number", "Mean squared logsumexp of the logits; large where they drift."
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
    "accepted_rate": Definition(
        "Overflow accepted", "share", "Share of the assignments that may be above capacity."
    ),
    "factor_needed": Definition(
        "Factor needed, all layers",
        "text",
        "Smallest capacity factor at which all layers together stay within that rate.",
    ),
    "factor_needed_worst": Definition(
        "Factor needed, worst layer",
        "text",
        "Smallest capacity factor at which every layer by itself stays within that rate.",
    ),
    "worst_layer": Definition("Worst layer", "count", "The layer that needs the largest factor."),
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
    "run": Definition("Run", "count", "Number of the run, of several that were opened together."),
    "role": Definition(
        "Role",
        "text",
        "Its place in tensor, data, expert and pipeline parallelism. A twin sees the same tokens "
        "as another rank and is left out of all sums.",
    ),
    "host": Definition("Node", "text", "Machine that the rank ran on."),
    "ep_ranks": Definition(
        "Expert-parallel ranks", "count", "Ranks that a layer's experts are spread over here."
    ),
    "ep_rank": Definition("Rank", "count", "Expert-parallel rank, which holds some experts."),
    "placement": Definition(
        "Placement", "text", "In order: neighbours together. Striped: dealt one by one."
    ),
    "rank_load": Definition(
        "Load", "number", "Assignments of the rank's experts; replicas share theirs evenly."
    ),
    "rank_load_over_mean": Definition(
        "Load / mean", "ratio", "Load of the rank ÷ mean load of the layer's ranks."
    ),
    "slowest_rank": Definition(
        "Slowest / mean rank",
        "ratio",
        "Load of the rank with the most ÷ mean load, in the sum of what is selected. The others "
        "wait for it.",
    ),
    "straggler_factor": Definition(
        "Straggler factor",
        "ratio",
        "Σ over steps of the slowest rank's load ÷ Σ of the mean: by how much a layer takes "
        "longer than if its ranks were even. It needs level steps.",
    ),
    "vllm_balancedness": Definition(
        "Balancedness, vLLM's",
        "ratio",
        "Σ over layers of the mean rank's load ÷ Σ of the largest, of the sum of what is "
        "selected; vLLM logs it of single steps. 1 is best.",
    ),
    "sglang_balancedness": Definition(
        "Balancedness, SGLang's",
        "ratio",
        "Mean over layers of mean ÷ largest rank load, of the sum of what is selected; SGLang "
        "logs it of single steps. 1 is best.",
    ),
    "divergence": Definition(
        "Divergence",
        "number",
        "Jensen–Shannon divergence of the load shares to base 2: 0 is equal, 1 has no expert in "
        "common.",
    ),
    "noise_bound": Definition(
        "Noise bound",
        "number",
        "The divergence that 95 % of resamples of one recording against itself stay below.",
    ),
    "layers_changed": Definition(
        "Layers that changed",
        "text",
        "Layers whose divergence is above their noise bound, of those that have one.",
    ),
    "divergence_largest": Definition(
        "Largest divergence", "number", "Divergence of the layer in which it is largest."
    ),
    "tokens_a": Definition("Tokens, A", "count", "Tokens of the recording that is open."),
    "tokens_b": Definition("Tokens, B", "count", "Tokens of the one that it is compared with."),
    "imbalance_a": Definition("Imbalance, A", "ratio", "Max ÷ mean load in A."),
    "imbalance_b": Definition("Imbalance, B", "ratio", "Max ÷ mean load in B."),
    "share_a": Definition("Share, A", "share", "Expert's share of the layer's load in A."),
    "share_b": Definition("Share, B", "share", "Expert's share of the layer's load in B."),
    "share_change": Definition(
        "Change, points", "number", "Share in B minus that in A, in percentage points."
    ),
    "phase": Definition("Phase", "text", "What the steps did: prefill, decode or both."),
    "tag": Definition("Tag", "text", "The recording's label for what was running."),
    "load_rank": Definition(
        "Rank by load", "text", "Place among the layer's experts, the most loaded first."
    ),
    "partner": Definition("Partner", "count", "Another expert that serves the same tokens."),
    "together": Definition("Tokens together", "count", "Tokens that chose both experts."),
    "together_expected": Definition(
        "If independent", "number", "Tokens that would choose both if choices were independent."
    ),
    "lift": Definition(
        "Lift",
        "ratio",
        "Tokens that chose both experts ÷ those that independent choices would give. Random "
        "top-k lies below 1, as a token never chooses an expert twice.",
    ),
    "strongest_pair": Definition(
        "Strongest pair",
        "text",
        "The two experts with the largest lift, of those that independent choices would bring "
        "together at least 5 times.",
    ),
    "next_expert": Definition("Next layer's expert", "count", "Expert of the next layer."),
    "next_share": Definition(
        "Share", "share", "Share of the expert's tokens that choose that one in the next layer."
    ),
    "repetition_first": Definition(
        "Same first choice",
        "share",
        "Share of consecutive tokens of a request with the same first choice.",
    ),
    "repetition_first_random": Definition(
        "Same first choice, random", "share", "What random routing gives: 1 ÷ experts."
    ),
    "repetition_any": Definition(
        "Any choice in common",
        "share",
        "Share of consecutive tokens of a request that have at least one expert in common.",
    ),
    "repetition_any_random": Definition(
        "Any choice in common, random", "share", "What random routing of the same top-k gives."
    ),
    "tags": Definition("Tags", "count", "Tags with tokens in what is selected."),
    "other_tag": Definition("Other tag", "text", "The tag that it is compared with."),
    "divergence_chance": Definition(
        "By chance",
        "number",
        "About the divergence of two samples of one pool that are as large as the two tags.",
    ),
    "skew_source": Definition(
        "Whose skew",
        "text",
        "The data's where less than half of the skew of the tags (max ÷ mean − 1) is left when "
        "they are mixed in equal parts: mixing requests helps. Else the model's: replicating hot "
        "experts helps.",
    ),
    "imbalance_tags": Definition(
        "Imbalance of a tag", "ratio", "Median max ÷ mean load over tags and layers."
    ),
    "imbalance_mixed": Definition(
        "Tags in equal parts", "ratio", "Median max ÷ mean load of the tags' mixture by layer."
    ),
    "request": Definition("Request", "text", "Number of the request, in the order of arrival."),
    "prefill_tokens": Definition("Prefill tokens", "count", "Tokens of the prompt."),
    "decode_tokens": Definition("Decode tokens", "count", "Tokens that were generated."),
    "other_tokens": Definition("Other tokens", "count", "Tokens of steps of other phases."),
    "divergence_from_all": Definition(
        "Divergence from all",
        "number",
        "Jensen–Shannon divergence between the request's load and that of all requests, mean "
        "over layers.",
    ),
    "top_experts": Definition(
        "Top experts", "text", "Its largest shares of a layer, as layer:expert."
    ),
    "placement_today": Definition(
        "Today", "ratio", "Slowest ÷ mean rank where the experts are now, or in order."
    ),
    "placement_eplb": Definition("EPLB", "ratio", "The same as placed by DeepSeek's balancer."),
    "placement_routeprof": Definition("routeprof", "ratio", "The same as placed by routeprof."),
    "placement_bound": Definition(
        "Lower bound", "ratio", "No placement in as many slots is below it."
    ),
    "goal": Definition(
        "What it is for",
        "text",
        "Latency-bound serving: the smallest factor at which all layers together overflow at most "
        "0.1 %; more slots cost time in every step. Quality-bound scoring: the smallest at which "
        "no step of any layer overflows.",
    ),
    "advice_phase": Definition(
        "Phase", "text", "Serving is decode, scoring is prefill, where the selection has them."
    ),
    "factor_advised": Definition(
        "Factor", "text", "The smallest capacity factor that is surely enough."
    ),
    "certainty": Definition(
        "Certainty",
        "text",
        "Exact from every step; else bounded from sums, and then on the safe side.",
    ),
    "overflow_most": Definition(
        "Overflow, at most", "share", "Overflow rate at that factor, all layers together."
    ),
    "padding_most": Definition(
        "Padding, at most", "share", "Padding rate at that factor, all layers together."
    ),
    "layout_attention": Definition(
        "Attention", "text", "TP: GPUs that share a replica. DP: replicas, each with own requests."
    ),
    "layout_experts": Definition(
        "Experts", "text", "EP: ranks with own experts. TP: GPUs that share each of these experts."
    ),
    "layout_quickest": Definition(
        "Quickest layout", "text", "Attention's split of the GPUs, then the experts'."
    ),
    "layout_gain": Definition(
        "TP alone takes",
        "text",
        "Step of the layout in which all GPUs share attention and every expert ÷ the quickest's.",
    ),
    "layout_sent_inside": Definition(
        "Sent inside nodes", "text", "Bytes of a step, dispatch and combine, all GPUs and layers."
    ),
    "layout_sent_between": Definition(
        "Sent between nodes", "text", "Bytes of a step, dispatch and combine, all GPUs and layers."
    ),
    "step_ms": Definition(
        "Step, ms", "number", "Attention, dispatch, experts and combine one after another."
    ),
    "attention_ms": Definition(
        "Attention, ms", "number", "All-reduce of attention's output among a replica's GPUs."
    ),
    "dispatch_ms": Definition(
        "Dispatch, ms", "number", "Tokens' way to the experts: the busiest link of any GPU."
    ),
    "experts_ms": Definition(
        "Experts, ms",
        "number",
        "GEMMs of the slowest rank; an expert takes its arithmetic or the reading of its weights.",
    ),
    "combine_ms": Definition(
        "Combine, ms", "number", "The way back; an all-reduce where every GPU holds all tokens."
    ),
    "ranks_per_token": Definition(
        "Ranks per token", "ratio", "Ranks that hold the experts of a token, mean."
    ),
    "nodes_per_token": Definition(
        "Nodes per token", "ratio", "Nodes that hold the experts of a token, mean."
    ),
    "sent_inside": Definition(
        "Inside nodes, MiB", "number", "Sent in a step, dispatch and combine, all GPUs and layers."
    ),
    "sent_between": Definition(
        "Between nodes, MiB", "number", "Sent in a step, dispatch and combine, all GPUs and layers."
    ),
    "layout_weights": Definition(
        "Weights per GPU, MiB", "number", "Routed experts of all layers on the fullest GPU."
    ),
    "gemm_mean_tokens": Definition(
        "Tokens per GEMM", "number", "Mean tokens of an expert that has any, in a step."
    ),
    "gemm_median_tokens": Definition(
        "Tokens per GEMM, median", "number", "Median tokens of an expert that has any, in a step."
    ),
    "policy": Definition(
        "Policy",
        "text",
        "How batches are composed. FIFO: neighbours in the order of arrival. random: the mean of "
        "20 orders. load-aware: each request where it leaves a batch least uneven, by what is "
        "known before it runs.",
    ),
    "batch_requests": Definition(
        "Requests", "count", "Requests in full batches; the same ones for every policy."
    ),
    "batches": Definition("Batches", "count", "Full batches that are composed."),
    "batch_steps": Definition(
        "Steps", "number", "Steps that the batches run, for random orders their mean."
    ),
    "batch_straggler": Definition(
        "Straggler factor",
        "ratio",
        "Σ largest ÷ Σ mean rank load over steps and layers of the composed batches.",
    ),
    "batch_imbalance": Definition(
        "Imbalance (max / mean)",
        "ratio",
        "Max ÷ mean load of experts, mean over steps and layers by their tokens.",
    ),
    "straggler_gain": Definition(
        "Gain: straggler", "number", "FIFO's straggler factor ÷ the policy's; 1 is none."
    ),
    "straggler_gain_low": Definition(
        "From: straggler",
        "number",
        "Lower end of the gain's 95 % interval, by a bootstrap over requests of each tag.",
    ),
    "straggler_gain_high": Definition(
        "To: straggler",
        "number",
        "Upper end of the gain's 95 % interval, by a bootstrap over requests of each tag.",
    ),
    "straggler_verdict": Definition(
        "Verdict: straggler",
        "text",
        "better or worse than FIFO where the interval does not have 1 in it.",
    ),
    "imbalance_gain": Definition(
        "Gain: imbalance", "number", "FIFO's imbalance ratio ÷ the policy's; 1 is none."
    ),
    "imbalance_gain_low": Definition(
        "From: imbalance",
        "number",
        "Lower end of the gain's 95 % interval, by a bootstrap over requests of each tag.",
    ),
    "imbalance_gain_high": Definition(
        "To: imbalance",
        "number",
        "Upper end of the gain's 95 % interval, by a bootstrap over requests of each tag.",
    ),
    "imbalance_verdict": Definition(
        "Verdict: imbalance",
        "text",
        "better or worse than FIFO where the interval does not have 1 in it.",
    ),
    "captured_layers": Definition(
        "Layers captured", "text", "MoE layers that were counted, of those that the model has."
    ),
}


def definition(name: str) -> Definition:
    """The definition of a column; an unknown one stands for itself."""
    return DEFINITIONS.get(name, Definition(name, "text", ""))
