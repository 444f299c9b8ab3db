"""One engine in a process of its own: ``python -m tests.sglang.drive SCENARIO RESULT``.

SCENARIO is a JSON file: ``engine`` are arguments of ``sglang.Engine``; each of ``rounds`` has
``prompts`` (token ids), ``new`` (tokens to generate for each) and may have ``want``, the state
that the recording is to be in before, and ``responses``, a file for the answers, with the experts
of each token. RESULT says of each round its requests, and where SGLang's own recorder wrote what it
saw, if it was asked for (``dump``).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.05,
    "max_total_tokens": 4096,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "log_level": "warning",
    "random_seed": 0,
}


def play(engine: Any, scene: dict[str, Any], dumps: Path | None) -> dict[str, Any]:
    """Serve one round greedily, all prompts at once."""
    if "want" in scene:
        have(scene["want"])
    greedy = {"temperature": 0, "max_new_tokens": scene["new"], "ignore_eos": True}
    routes = {"return_routed_experts": True} if "responses" in scene else {}
    answers = engine.generate(input_ids=scene["prompts"], sampling_params=greedy, **routes)
    if routes:
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
        Path(scene["responses"]).write_text(lines)
    requests = [
        {
            "prompt": prompt,
            "cached": answer["meta_info"]["cached_tokens"],
            "generated": answer["output_ids"],
        }
        for prompt, answer in zip(scene["prompts"], answers, strict=True)
    ]
    return {"requests": requests, "dump": "" if dumps is None else dump(engine, dumps)}


def have(state: Any) -> None:
    """Put the recording into a state, as another process would."""
    from routeprof.capture.control import answered, request, wait_for

    out = Path(json.loads(os.environ["ROUTEPROF_RUN"])["out"])
    number = request(out, state)
    states = wait_for(out, number, 20)
    assert all(answered(one, number) for one in states.values())


def dump(engine: Any, folder: Path) -> str:
    """Have SGLang's recorder write what it saw, and start again."""
    before = set(folder.iterdir())
    engine.dump_expert_distribution_record()
    (new,) = set(folder.iterdir()) - before
    return str(new)


def schedule(*args: Any, **kwargs: Any) -> Any:
    """A scheduler's process; what SGLang has experts' ids kept in works without an accelerator."""
    import torch
    from sglang.srt.eplb import expert_distribution
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.state_capturer import base

    expert_distribution.get_device = lambda *args, **kwargs: "cpu"
    torch.cpu.empty_cache = lambda: None
    base.ALLOC_MEMORY_FUNCS = {"cpu": lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype)}
    return run_scheduler_process(*args, **kwargs)


def start(arguments: dict[str, Any]) -> Any:
    """An engine. Without tokenizer, its detokenizer would import everything and sleep."""
    from sglang.srt.entrypoints.engine import Engine

    class OwnEngine(Engine):
        run_scheduler_process_func = staticmethod(schedule)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
            return [], []

    return OwnEngine(**arguments)


def main(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run the scenario."""
    arguments = ENGINE | scenario["engine"]
    engine = start(arguments)
    dumps = None
    if arguments.get("expert_distribution_recorder_mode"):
        dumps = Path(os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"])
        engine.start_expert_distribution_record()
    rounds = [play(engine, scene, dumps) for scene in scenario["rounds"]]
    engine.shutdown()
    return {"rounds": rounds}


if __name__ == "__main__":
    scenario_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(scenario_file.read_text()))))
