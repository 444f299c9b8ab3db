"""A program that generates until it is told to stop, and keeps its own account of the experts.

It knows nothing of routeprof. ``python live.py FOLDER [MODE]`` writes one line to ``passes.jsonl``
for every forward pass: for each MoE layer, the assignments of each expert, taken from what the
experts' own loop is handed. When ``stop`` appears in the folder it ends, and says on stdout how
many hooks its model has.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

LAYERS, EXPERTS = 3, 8
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_local_experts": EXPERTS,
    "experts_implementation": "eager",
}
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name and name.startswith("_forward")]


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**CONFIG)).eval()


def keep_account(model: nn.Module, file: Path) -> None:
    """Write a line for each pass that comes to its end."""
    seen: list[list[int]] = []
    one_hot, forward, log = functional.one_hot, model.forward, file.open("a")

    def watched_one_hot(ids, num_classes):
        seen.append(ids.flatten().bincount(minlength=num_classes).tolist())
        return one_hot(ids, num_classes)

    def watched_forward(*args, **kwargs):
        seen.clear()
        output = forward(*args, **kwargs)
        print(json.dumps(seen), file=log, flush=True)
        return output

    functional.one_hot = watched_one_hot
    model.forward = watched_forward


def generate(model: nn.Module, folder: Path) -> None:
    """Generate from prompts that are all different until told to stop."""
    random = torch.Generator().manual_seed(int(folder.stat().st_ino) % 1000)
    while not (folder / "stop").exists():
        ids = torch.randint(1, 64, (4, 6), generator=random)
        model.generate(input_ids=ids, max_new_tokens=6, do_sample=True, pad_token_id=0)


def main(folder: Path, mode: str = "generate") -> None:
    torch.set_num_threads(1)
    model = make()
    if mode == "compiled":
        compiled = torch.compile(model.model.layers[0], backend="eager")
        compiled(torch.zeros(1, 2, 32), position_embeddings=model.model.rotary_emb(
            torch.zeros(1, 2, 32), torch.arange(2)[None]))  # fmt: skip
    keep_account(model, folder / "passes.jsonl")
    if mode == "served":  # the main thread waits, as that of a server does
        worker = threading.Thread(target=generate, args=(model, folder))
        worker.start()
        worker.join()
    else:
        generate(model, folder)
    hooks = sum(len(getattr(module, name)) for module in model.modules() for name in HOOKS)
    print(json.dumps({"hooks": hooks, "modules": "routeprof" in sys.modules}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
