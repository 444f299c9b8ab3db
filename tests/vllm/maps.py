"""What vLLM makes of a placement, in a process of its own: ``python -m tests.vllm.maps IN OUT``.

IN has ``physical_to_logical_map`` and ``loads``, ``[layers, experts]``; OUT has the maps that vLLM
derives from the first, and what its balancer decides for the second, on 4 ranks.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

if __name__ == "__main__":
    given = np.load(sys.argv[1], allow_pickle=False)
    slots, loads = (torch.from_numpy(given[n]) for n in ("physical_to_logical_map", "loads"))
    of_experts, replicas = compute_logical_maps(slots, loads.shape[1])
    decided = DefaultEplbPolicy.rebalance_experts(loads, slots.shape[1], 1, 1, 4)
    np.savez(
        sys.argv[2],
        logical_to_physical_map=of_experts.numpy(),
        logical_replica_count=replicas.numpy(),
        decided=decided.numpy(),
    )
