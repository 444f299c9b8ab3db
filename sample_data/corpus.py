"""The texts that the sample is trained on: only what ships with Python and Debian.

Each kind is a list of documents in a fixed order. Every tenth is held out of training.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from routeprof.sample_data import PROMPT_KINDS, PROMPTS_DIR

LICENCES = Path("/usr/share/common-licenses")
POEMS = Path("/usr/share/games/fortunes")
POEM_FILES = ("tang300", "song100")
POEM_PACKAGE = "fortunes-zh"
HELD_OUT_EVERY = 10
PROMPTS = 16

Corpus = dict[str, list[str]]
Shape = Callable[[random.Random], dict[str, Any]]


def load_corpus() -> tuple[Corpus, Corpus]:
    """The training documents and the held-out ones, by kind."""
    kinds = dict(zip(PROMPT_KINDS, (prose(), code(), records(), poems()), strict=True))
    return (
        {
            kind: [text for i, text in enumerate(texts, 1) if i % HELD_OUT_EVERY]
            for kind, texts in kinds.items()
        },
        {kind: texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for kind, texts in kinds.items()},
    )


def prose() -> list[str]:
    """English: the topics of Python's help, and Debian's licence texts without their aliases."""
    if not LICENCES.is_dir():
        raise SystemExit(f"{LICENCES} is missing: install the Debian package base-files")
    licences = [path for path in sorted(LICENCES.iterdir()) if not path.is_symlink()]
    texts = [path.read_text(encoding="utf-8") for path in licences]
    return texts + [topics[name] for name in sorted(topics)]


def code() -> list[str]:
    """The modules at the top of this Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))]


def poems() -> list[str]:
    """Chinese: poems of the Tang and Song dynasties, without their terminal colours."""
    missing = [name for name in POEM_FILES if not (POEMS / name).is_file()]
    if missing:
        raise SystemExit(f"{POEMS / missing[0]} is missing: apt-get install {POEM_PACKAGE}")
    text = "".join((POEMS / name).read_text(encoding="utf-8") for name in POEM_FILES)
    plain = re.sub(r"\x1b\[\d*m", "", text)
    return [poem.strip("\n") + "\n\n" for poem in plain.split("\n%\n") if poem.strip()]


def records(documents: int = 500, lines: int = 12, seed: int = 7) -> list[str]:
    """Generated JSON records, one a line; the records of a document have one shape."""
    rng = random.Random(seed)
    # Three shapes, so that every tenth document meets each of them.
    shapes: tuple[Shape, ...] = (_request, _reading, _order)
    return [
        "".join(json.dumps(shapes[i % len(shapes)](rng)) + "\n" for _ in range(lines))
        for i in range(documents)
    ]


def _request(rng: random.Random) -> dict[str, Any]:
    return {
        "time": _time(rng),
        "level": rng.choice(("debug", "info", "warning", "error")),
        "method": rng.choice(("GET", "POST", "PUT", "DELETE")),
        "path": f"/v1/{rng.choice(('users', 'items', 'carts', 'search'))}/{rng.randrange(1000)}",
        "status": rng.choice((200, 201, 204, 301, 404, 500)),
        "client": f"192.0.2.{rng.randrange(256)}",
        "milliseconds": round(rng.uniform(0.2, 900), 1),
    }


def _reading(rng: random.Random) -> dict[str, Any]:
    return {
        "sensor": f"{rng.choice(('roof', 'cellar', 'hall', 'garden'))}-{rng.randrange(10)}",
        "time": _time(rng),
        "celsius": round(rng.gauss(18, 6), 2),
        "humidity": round(rng.uniform(20, 95), 1),
        "battery": {"volts": round(rng.uniform(2.8, 3.3), 2), "low": rng.random() < 0.1},
    }


def _order(rng: random.Random) -> dict[str, Any]:
    return {
        "order": rng.randrange(10_000, 100_000),
        "customer": f"{rng.choice(('ada', 'bo', 'chen', 'dina', 'emre'))}@example.org",
        "lines": [
            {"sku": f"{rng.choice('ABCDEF')}{rng.randrange(1000):03}", "count": rng.randrange(1, 9)}
            for _ in range(rng.randrange(1, 4))
        ],
        "paid": rng.random() < 0.8,
        "note": rng.choice((None, "gift", "fragile", "call first")),
    }


def _time(rng: random.Random) -> str:
    month, day, hour, minute, second = (rng.randrange(n) for n in (12, 28, 24, 60, 60))
    return f"2024-{month + 1:02}-{day + 1:02}T{hour:02}:{minute:02}:{second:02}Z"


def write_prompts(folder: Path) -> None:
    """Write the prompts that are openings of held-out documents: JSON records and poems."""
    _, held_out = load_corpus()
    for kind, characters in (("json", 200), ("chinese", 60)):
        long = [text for text in held_out[kind] if len(text.strip()) > characters]
        openings = [text[:characters] for text in long[:PROMPTS]]
        (folder / f"{kind}.txt").write_text("\n%%\n".join(openings) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the prompts cut from held-out documents.")
    parser.add_argument("--out", type=Path, default=PROMPTS_DIR, help="folder to write them to")
    write_prompts(parser.parse_args().out)
