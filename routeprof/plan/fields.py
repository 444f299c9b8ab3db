"""Reading a config.json without trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routeprof.errors import UsageError

MISSING = object()
MOST = 10**9


class Fields:
    """A config.json's values, checked as they are read.

    Fields that transformers gives a value where a config leaves them out take the same default
    here; the sizes that make a model have none and must be there.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def is_auto(self, name: str) -> bool:
        """Whether the field is left to follow from others."""
        return self._values.get(name) in (None, "auto")

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        return value if isinstance(value, str) else default

    def number(self, *names: str, default: Any = MISSING, least: int = 1) -> int:
        """A whole number under the first of the names that is there.

        Raises:
            UsageError: it is missing and has no default, or is no number of ``least`` or more.
        """
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            if default is MISSING:
                raise UsageError(
                    f"{self.source} lacks {names[0]}: pass the model's own config.json"
                )
            return int(default)
        value = self._values[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= MOST:
            raise UsageError(
                f"{self.source}: {name} is {value!r:.40}, not a number of {least} or more: pass "
                f"the model's own config.json"
            )
        return int(value)

    def maybe(self, *names: str) -> int | None:
        """The same, or None where it is missing or null."""
        return self.number(*names) if any(self.has(name) for name in names) else None

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            UsageError: it is neither.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.source}: {name} is {value!r:.40}: pass true or false")
        return value

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where it is missing.

        Raises:
            UsageError: it is something else.
        """
        return self._list(name, int)

    def words(self, *names: str) -> tuple[str, ...] | None:
        """A list of words under the first of the names that is there, or None."""
        name = next((name for name in names if self.has(name)), None)
        return None if name is None else self._list(name, str)

    def _list(self, name: str, kind: type) -> tuple[Any, ...] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or not all(type(item) is kind for item in value):
            raise UsageError(
                f"{self.source}: {name} is no list of {kind.__name__}: pass the model's own "
                f"config.json"
            )
        return tuple(value)

    def layers(self) -> int:
        """How many layers the model has."""
        count = self.number("num_hidden_layers")
        if count > 100_000:
            raise UsageError(f"{self.source}: {count} layers are too many to be true")
        return count

    def layer_types(
        self, count: int, allowed: Sequence[str], *names: str
    ) -> tuple[str, ...] | None:
        """The type of each layer in transformers' words of today, or None where none are told.

        Raises:
            UsageError: as many as there are layers are not told, or one is not known.
        """
        found = self.words(*(names or ("layer_types", "layers_block_type")))
        if found is None:
            return None
        types = tuple(OLD_TYPES.get(word, word) for word in found)
        unknown = sorted(set(types) - set(allowed))
        if unknown:
            raise UsageError(
                f"{self.source}: layers of type {unknown[0]!r:.40} are not known in this family"
            )
        if len(types) != count:
            raise UsageError(f"{self.source} tells the type of {len(types)} layers and has {count}")
        return types


OLD_TYPES = {
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "attention": "full_attention",
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
}
