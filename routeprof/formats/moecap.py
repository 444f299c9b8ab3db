"""MoE-CAP's ``expert_distribution_record.jsonl``: a line for each pass, without counts of experts.

A line has ``forward_pass_id``, ``batch_size``, ``latency`` (seconds), ``seq_lens_sum``,
``forward_mode`` (``prefill`` or ``decode``) and ``expert_activation``, the experts of a layer that
got any token, on average over the layers (``moe_cap/systems/sglang.py`` and ``vllm.py``). Which
experts those were, and how many tokens each got, it does not say: nothing that routeprof shows can
be made of it, and nothing is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from routeprof.errors import UsageError
from routeprof.formats.documents import mentions
from routeprof.formats.json_lines import objects
from routeprof.formats.opening import one_of
from routeprof.formats.source import Source


def is_moecap(path: Path) -> bool:
    """JSON lines with the experts that were used and the kind of pass."""
    return mentions(path, "expert_activation", "forward_mode")


def read_moecap(paths: Sequence[Path]) -> Source:
    """Say what a file holds, and what would hold counts.

    Raises:
        UsageError: always; it tells passes and their experts by phase.
    """
    path = one_of(paths)
    used: dict[str, list[float]] = {}
    for where, line in objects(path):
        phase, mean = line.get("forward_mode"), line.get("expert_activation")
        if phase not in ("prefill", "decode") or not isinstance(mean, int | float):
            raise UsageError(f"{where} is no record of MoE-CAP: mend or remove it")
        used.setdefault(phase, []).append(float(mean))
    if not used:
        raise UsageError(f"{path} holds no pass: record with routeprof run instead")
    passes = "; ".join(
        f"{phase}: passes {len(means):,}, experts used in a layer {sum(means) / len(means):.1f}"
        for phase, means in sorted(used.items(), reverse=True)
    )
    raise UsageError(
        f"{path} has no counts of experts, only averages ({passes}): record with routeprof run, or "
        "pass the .pt file of SGLang's recorder"
    )
