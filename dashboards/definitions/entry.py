"""What a definition is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["count", "ratio", "share", "number", "text", "seconds"]


@dataclass(frozen=True)
class Definition:
    """A column or key figure.

    Attributes:
        label: its name on the page, with the unit where it has one.
        kind: how its values are written.
        text: what it means, in a sentence or two.
    """

    label: str
    kind: Kind
    text: str
