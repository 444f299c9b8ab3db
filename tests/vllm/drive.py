"""One engine in a process of its own: ``python -m tests.vllm.drive SCENARIO RESULT``.

SCENARIO is a JSON file: ``engine`` are arguments of ``vllm.LLM``; each of ``rounds`` has
``prompts`` (token ids), ``new`` (tokens to generate for each) and ``calls`` (methods of the worker
to call before, with their arguments); ``piecewise`` is whether to compile as on GPUs. RESULT says
of each round its requests and how long it took, and what the oracle of each worker saw, if there
is one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.vllm import piecewise

ENGINE = {
    "gpu_memory_utilization": 0.3,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "seed": 0,
    "disable_log_stats": False,
}


def play(engine: Any, scene: dict[str, Any]) -> dict[str, Any]:
    """Serve one round greedily, all prompts at once."""
    from vllm import SamplingParams

    for method, *args in scene.get("calls", ()):
        engine.collective_rpc(method, args=tuple(args))
    prompts = [{"prompt_token_ids": ids} for ids in scene["prompts"]]
    greedy = SamplingParams(temperature=0, max_tokens=scene["new"], ignore_eos=True)
    start = perf_counter()
    answers = engine.generate(prompts, greedy, use_tqdm=False)
    seconds = perf_counter() - start
    requests = [
        {
            "prompt": list(answer.prompt_token_ids),
            "cached": answer.num_cached_tokens,
            "generated": list(answer.outputs[0].token_ids),
        }
        for answer in answers
    ]
    return {"requests": requests, "seconds": seconds}


def preemptions(engine: Any) -> int:
    """How often the engine says that it took a request's cache away."""
    found = [one for one in engine.get_metrics() if one.name == "vllm:num_preemptions"]
    return int(sum(one.value for one in found))


def main(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run the scenario."""
    from vllm import LLM

    if scenario.get("piecewise"):
        piecewise.install()
    engine = LLM(**ENGINE | scenario["engine"])
    watched = "worker_extension_cls" in scenario["engine"]
    if watched:
        eager = bool(scenario["engine"].get("enforce_eager"))
        engine.collective_rpc("oracle_begin", args=(eager,))
    rounds = [play(engine, scene) for scene in scenario["rounds"]]
    return {
        "rounds": rounds,
        "preemptions": preemptions(engine),
        "oracle": engine.collective_rpc("oracle_read") if watched else [],
    }


if __name__ == "__main__":
    scenario_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(scenario_file.read_text()))))
