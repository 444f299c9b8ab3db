"""How much memory recordings need, in processes of their own: ``python -m tests.bench memory``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench import window_parts
from tests.bench.fold import write_tokens
from tests.bench.kept import Figure, figure

PEAK = """
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
LOAD = "import routeprof, sys; profile = routeprof.load(sys.argv[1])\n"
JOBS = {
    "import routeprof, and what loading needs": (
        "import routeprof, routeprof.profile, pandas, pyarrow.parquet"
    ),
    "load windows": LOAD,
    "load windows, all CSV files": LOAD + "profile.write_csv(sys.argv[1] + '-csv')",
    "load windows, HTML report": (
        LOAD + "from pathlib import Path\n"
        "from routeprof.report.html import write_html\n"
        "write_html(profile, Path(sys.argv[1] + '.html'))"
    ),
    "load windows, findings": LOAD + "profile.findings()",
}
FOLD = (
    "import sys; from routeprof.recording.reader import open_recording\n"
    "from pathlib import Path\n"
    "from routeprof.recording.recount import count_tokens\n"
    "files = open_recording(Path(sys.argv[1])); count_tokens(files.parts('tokens'), files.info)"
)
CEILING = 1024.0
"""MiB, as promised."""


def peak(code: str, path: Path) -> float:
    """Largest resident memory of a Python process that runs the code, in MiB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + PEAK, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def results(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[Figure]]]:
    """The suite's name, how it was measured, and its figures."""
    parser = argparse.ArgumentParser(prog="make bench ARGS='memory …'", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--assignments", type=int, nargs=2, default=[1 << 24, 1 << 27])
    chosen = parser.parse_args(arguments)
    options: dict[str, Any] = {"unit": "MiB", "digits": 0, "better": "lower", "target": CEILING}
    figures = []
    with tempfile.TemporaryDirectory(prefix="routeprof-bench-") as temporary:
        folder = Path(temporary)
        for ranks in chosen.ranks:
            path = folder / f"windows-{ranks}"
            window_parts.write(path, ranks=ranks, windows=60, parts=60)
            for name, code in JOBS.items():
                runs = [peak(code, path) for _ in range(chosen.rounds)]
                column = f"{ranks} ranks × 60 windows"
                figures.append(figure("windows", name, column, runs, **options))
        for assignments in chosen.assignments:
            path = folder / f"tokens-{assignments}"
            write_tokens(path, assignments, 1 << 22)
            runs = [peak(FOLD, path) for _ in range(chosen.rounds)]
            column = f"{assignments / 1e6:,.0f} million assignments"
            figures.append(figure("tokens", "count the tokens' ids", column, runs, **options))
    yield "memory", f"Processes of their own, {chosen.rounds} of each; MiB.", figures
