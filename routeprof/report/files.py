"""Writing a report to a file."""

from __future__ import annotations

from pathlib import Path


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 with its own line ends to a file, whose directory is made; returns the file."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return file
