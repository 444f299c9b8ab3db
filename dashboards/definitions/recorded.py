"""What a recording says: loads, steps, gate outputs, ranks, tags."""

from __future__ import annotations

from routeprof.dashboards.definitions.entry import Definition

RECORDED: dict[str, Definition] = {
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
        "What chance stays below: that anything at all exceeds it where nothing changed has a "
        "chance of 5 %, for all layers, experts, phases and tags together. As routeprof diff "
        "finds it.",
    ),
    "layers_changed": Definition(
        "Layers that changed",
        "text",
        "Layers whose divergence is above its noise bound, or the change of an expert's share "
        "above that one's; of those that have bounds, in each phase and tag.",
    ),
    "p": Definition(
        "p",
        "number",
        "Chance that anything among all that is compared differs as much where nothing changed; "
        "of a layer the smaller of its own and its experts'.",
    ),
    "change": Definition(
        "Verdict",
        "text",
        "Changed, where p is at most 0.05; within the noise; or noise not known.",
    ),
    "experts_changed": Definition(
        "Experts that changed", "count", "Whose share changed by more than noise."
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
    "captured_layers": Definition(
        "Layers captured", "text", "MoE layers that were counted, of those that the model has."
    ),
}
