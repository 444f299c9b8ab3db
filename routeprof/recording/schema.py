"""Recording v1: names, columns and types. docs/recording.md is the data dictionary."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa

from routeprof.errors import NewerSchemaError, NotARecordingError
from routeprof.topology import Layer, ModelInfo, RankRole

SCHEMA_VERSION = 1
INFO_FILE = "recording.json"
RANK_FILE = "rank.json"
KINDS = {"part": "windows", "steps": "steps", "tokens": "tokens", "rows": "tokens"}
"""Part kinds, by the prefix of the file name, and the level that writes them."""


def rank_directory(rank: int) -> str:
    """Name of a rank's directory inside the recording."""
    return f"rank-{rank:05d}"


def part_name(kind: str, number: int) -> str:
    """Name of a part file."""
    return f"{kind}-{number:06d}.parquet"


def coarse_name(first: int, last: int) -> str:
    """Name of a file that stands for the window parts with these numbers."""
    return f"coarse-{first:06d}-{last:06d}.parquet"


_INTS = pa.list_(pa.int64())
_FLOATS = pa.list_(pa.float64())
_NAME = pa.dictionary(pa.int32(), pa.string())

# counts and all sums are of the window alone. imbalance_max is not a sum: it is the largest
# max / mean load of any step so far, so that the maximum over windows is the recording's.
WINDOW_SCHEMA = pa.schema(
    [
        ("window", pa.int64()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("rank", pa.int32()),
        ("layer", pa.int32()),
        ("phase", _NAME),
        ("tag", _NAME),
        ("steps", pa.int64()),
        ("calls", pa.int64()),
        ("tokens", pa.int64()),
        ("expected_tokens", pa.int64()),
        ("counts", _INTS),
        ("invalid", pa.int64()),
        ("max_load_sum", pa.int64()),
        ("imbalance_histogram", _INTS),
        ("imbalance_max", pa.float64()),
        ("gemm_histogram", _INTS),
        ("overflow", _INTS),
        ("overflow_steps", _INTS),
        ("capacity_slots", _INTS),
        ("gate_rows", pa.int64()),
        ("probability_mass", _FLOATS),
        ("weight_sum", _FLOATS),
        ("entropy_sum", pa.float64()),
        ("top1_sum", pa.float64()),
        ("margin_sum", pa.float64()),
        ("z_sum", pa.float64()),
        ("cost_seconds", pa.float64()),
    ]
)

STEP_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("time", pa.float64()),
        ("rank", pa.int32()),
        ("layer", pa.int32()),
        ("phase", _NAME),
        ("tag", _NAME),
        ("requests", pa.int32()),
        ("tokens", pa.int64()),
        ("invalid", pa.int64()),
        ("counts", pa.list_(pa.int32())),
    ]
)

ROW_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("pass", _NAME),
        ("request", pa.list_(pa.int32())),
        ("position", pa.list_(pa.int32())),
    ]
)


TOKEN_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("layer", pa.int32()),
        ("phase", _NAME),
        ("tokens", pa.int32()),
        ("ids", pa.binary()),
    ]
)
"""``ids`` are tokens · top_k expert ids, token-major, as `routeprof.recording.id_bytes` packs them.

``phase`` is null where nobody noted it.
"""

OPTIONAL = {"tokens": frozenset({"phase"})}
"""Columns that a part of an earlier version may lack; all of them are null then."""

SCHEMAS = {
    "part": WINDOW_SCHEMA,
    "steps": STEP_SCHEMA,
    "tokens": TOKEN_SCHEMA,
    "rows": ROW_SCHEMA,
}
"""What each kind of part is read as."""


@dataclass(frozen=True)
class RecordingInfo:
    """What ``recording.json`` says: true for all ranks and all of the time.

    Attributes:
        passes: for each layer, the module whose forward pass is its step.
        window_seconds: how long a window should be; one is longer when the drain fell behind.
        started: seconds since the epoch.
        run: name of the launch, the same for all its ranks on all nodes; empty where none was
            given. Directories of one run are parts of one recording.
        source: the tool whose files were converted; empty for what routeprof recorded.
        notes: what a reader of converted numbers must know.
        batches: False where a converted file has the tokens of requests, and not which of them ran
            together: its steps are pieces of requests, and nothing is said of the engine's.
    """

    id: str
    layers: tuple[Layer, ...]
    passes: tuple[str, ...]
    model: ModelInfo = field(default_factory=ModelInfo)
    level: str = "windows"
    gate: bool = True
    window_seconds: float = 1.0
    capacity_factors: tuple[float, ...] = ()
    capacity_rule: str = "ceil"
    imbalance_bins_per_octave: int = 32
    started: float = 0.0
    routeprof: str = ""
    run: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()
    batches: bool = True

    def to_json(self) -> str:
        """The text of ``recording.json``."""
        return json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> RecordingInfo:
        """Parse ``recording.json``.

        Raises:
            NotARecordingError: the text is something else.
            NewerSchemaError: it was written by a newer routeprof.
        """
        try:
            data = json.loads(text)
            schema = int(data.pop("schema"))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise NotARecordingError(
                f"{where} is damaged or no recording ({error}); name a directory that "
                "routeprof.record or routeprof run wrote"
            ) from error
        if schema > SCHEMA_VERSION:
            raise NewerSchemaError(
                f"{where} has schema {schema}, this routeprof reads up to {SCHEMA_VERSION}; "
                "run: pip install --upgrade routeprof"
            )
        return cls._build(data, where)

    @classmethod
    def _build(cls, data: dict[str, Any], where: str) -> RecordingInfo:
        try:
            data["layers"] = tuple(_layer(layer) for layer in data["layers"])
            data["passes"] = tuple(data["passes"])
            data["model"] = _model(data["model"])
            data["capacity_factors"] = tuple(data["capacity_factors"])
            data["notes"] = tuple(data.get("notes", ()))
            return cls(**_known(cls, data))
        except (KeyError, TypeError) as error:
            raise NotARecordingError(
                f"{where} lacks what a recording must say ({error}); it may be damaged: "
                "restore it from a copy"
            ) from error


@dataclass
class RankState:
    """What ``rank.json`` says: one process's part in the recording, rewritten at every flush.

    Attributes:
        state: ``recording``, ``paused`` or ``stopped``. A rank that was killed stays at
            ``recording`` while ``updated`` grows old.
        parts: number of part files written, by kind.
        problems: what was lost or went wrong, by name; absent names did not happen.
        cost_seconds: own time in the engine's thread; busy_seconds: time of the steps measured.
        layers, passes: what this rank captures where it is not what ``recording.json`` says, as
            in a pipeline stage; empty where it is.
        facts: what else there is to know, counted by name: ``prefix_cached_tokens`` were not
            computed, so not routed; ``preemptions`` made requests compute again.
        control: number of the newest request that the rank has obeyed; 0 for none.
        pid_namespace: names the processes among which ``pid`` is one; empty where unknown.
    """

    role: RankRole = field(default_factory=RankRole)
    pid: int = 0
    host: str = ""
    state: str = "recording"
    started: float = 0.0
    updated: float = 0.0
    flush_seconds: float = 0.0
    parts: dict[str, int] = field(default_factory=dict)
    problems: dict[str, Any] = field(default_factory=dict)
    cost_seconds: float = 0.0
    busy_seconds: float = 0.0
    layers: tuple[Layer, ...] = ()
    passes: tuple[str, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)
    control: int = 0
    pid_namespace: str = ""

    def to_json(self) -> str:
        """The text of ``rank.json``."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RankState:
        """Parse ``rank.json``; raises ValueError, TypeError or KeyError where it is damaged."""
        data = json.loads(text)
        data["role"] = RankRole(**_known(RankRole, data["role"]))
        if not all(isinstance(number, int) for number in asdict(data["role"]).values()):
            raise TypeError("a role consists of whole numbers")
        if not isinstance(data["parts"], dict) or not isinstance(data["problems"], dict):
            raise TypeError("parts and problems are mappings")
        data["layers"] = tuple(_layer(layer) for layer in data.get("layers", ()))
        data["passes"] = tuple(data.get("passes", ()))
        if len(data["layers"]) != len(data["passes"]):
            raise ValueError("each layer has a pass")
        return cls(**_known(cls, data))


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that this routeprof knows; a newer one of the same schema may write more."""
    return {item.name: data[item.name] for item in fields(kind) if item.name in data}


def _model(data: dict[str, Any]) -> ModelInfo:
    model = ModelInfo(**_known(ModelInfo, data))
    if not isinstance(model.config, dict | None):
        raise TypeError("config of the model is an object or null")
    return model


def _layer(data: dict[str, Any]) -> Layer:
    layer = Layer(**_known(Layer, data))
    numbers = (layer.index, layer.experts, 0 if layer.top_k is None else layer.top_k)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("index, experts and top_k of a layer are whole numbers")
    return layer
