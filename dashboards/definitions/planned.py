"""What a memory plan says: bytes of the fullest GPU, and what fits."""

from __future__ import annotations

from routeprof.dashboards.definitions.entry import Definition

_PART = "On the fullest GPU, in the chosen type with its scales."

PLANNED: dict[str, Definition] = {
    "plan_fits": Definition(
        "Layouts that fit",
        "text",
        "Splits of the GPUs whose weights, cache and what is held back fit on the fullest GPU.",
    ),
    "parameters": Definition("Parameters", "text", "Numbers in the model's weights."),
    "weights_whole": Definition(
        "Weights", "text", "Bytes of the whole model, once, in the chosen type with its scales."
    ),
    "weights_best": Definition(
        "Weights per GPU", "text", "On the fullest GPU of the layout that holds the most."
    ),
    "most_sequences": Definition(
        "Sequences at most",
        "text",
        "Of the chosen length, on all GPUs together, in the layout that holds the most.",
    ),
    "fits": Definition("Fits", "text", "yes, no, or – where the cache's size is not known."),
    "obstacle": Definition("Why not", "text", "Why engines could not run it at all."),
    "sequences": Definition(
        "Sequences at most", "count", "Of the chosen length, on all GPUs together."
    ),
    "weights_gib": Definition("Weights, GiB", "number", _PART),
    "attention_gib": Definition("Attention, GiB", "number", _PART),
    "state_weights_gib": Definition(
        "Mamba and linear attention, GiB", "number", f"Their weights. {_PART}"
    ),
    "shared_gib": Definition("Shared experts, GiB", "number", _PART),
    "routed_gib": Definition("Routed experts, GiB", "number", _PART),
    "embeddings_gib": Definition("Embeddings, GiB", "number", _PART),
    "other_gib": Definition("Other weights, GiB", "number", _PART),
    "kv_gib": Definition(
        "KV cache, GiB", "number", "Keys and values of the sequences at once on the fullest GPU."
    ),
    "state_gib": Definition(
        "Fixed state, GiB", "number", "Recurrent states of these sequences; they do not grow."
    ),
    "held_back_gib": Definition(
        "Held back, GiB",
        "number",
        "The larger of the reserve and of activations, all-to-all buffers, runtime and CUDA "
        "graphs.",
    ),
    "cache_room_gib": Definition(
        "Left for cache, GiB",
        "number",
        "GPU memory without weights and what is held back; below 0 where these are too many.",
    ),
    "activations_gib": Definition(
        "Activations, GiB", "number", "Of one forward pass; a part of what is held back."
    ),
    "buffers_gib": Definition(
        "All-to-all buffers, GiB", "number", "Dispatch and combine; a part of what is held back."
    ),
    "spans_nodes": Definition(
        "Shared between nodes", "text", "yes: GPUs that share attention or an expert are apart."
    ),
}
