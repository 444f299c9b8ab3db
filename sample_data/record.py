"""Recordings of a model that generates from the sample prompts, each kind under its tag.

python -m routeprof.sample_data.record --out sample_data/recordings/healthy
python -m routeprof.sample_data.record --model DIR --out sample_data/recordings/collapsed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routeprof.sample_data import MODEL_DIR, PROMPT_KINDS, encode, load_model, load_prompts

PROMPTS, NEW_TOKENS = 16, 64


def record_prompts(
    model: Any,
    directory: Path,
    *,
    level: str = "windows",
    window: float = 1.0,
    new_tokens: int = NEW_TOKENS,
    name: str = "sample model",
    done: Callable[[str], None] = lambda kind: None,
) -> None:
    """Generate from each kind of prompt and from all of them mixed, one batch each.

    Args:
        done: called with the kind when its batch is finished.
    """
    import torch

    from routeprof.hooks.transformers import record

    options: dict[str, Any] = {"level": level, "window": window, "name": name}
    with torch.inference_mode(), record(model, directory, **options) as recording:
        for kind in (*PROMPT_KINDS, "mixed"):
            with recording.tag(kind):
                # Greedy text of so small a model runs in circles.
                torch.manual_seed(0)
                batch = encode(load_prompts(kind)[:PROMPTS])
                model.generate(**batch, max_new_tokens=new_tokens, do_sample=True, temperature=0.7)
            done(kind)


def main() -> None:
    """Make one recording."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the recording")
    arguments = parser.parse_args()
    name = "sample model" if arguments.model == MODEL_DIR else arguments.model.name
    model = load_model(arguments.model)
    record_prompts(model, arguments.out, window=0.25, name=name, done=print)


if __name__ == "__main__":
    main()
