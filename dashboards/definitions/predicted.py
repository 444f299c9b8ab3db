"""What is predicted: placements, capacity factors, layouts, batches."""

from __future__ import annotations

from routeprof.dashboards.definitions.entry import Definition

PREDICTED: dict[str, Definition] = {
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
}
