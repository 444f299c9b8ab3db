"""A profile in the files of other tools: counts, tables, and counters beside a GPU trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from routeprof.errors import UsageError
from routeprof.formats.trace import write_trace
from routeprof.metrics._arrays import IntArray
from routeprof.profile import Profile


@dataclass(frozen=True)
class Written:
    """A kind of file.

    Attributes:
        about: what it is; suffixes: endings by which it is known.
        write: writes a profile to a path.
    """

    about: str
    suffixes: tuple[str, ...]
    write: Callable[[Profile, Path], None]


def all_layers(profile: Profile) -> IntArray:
    """Assignments of all layers of the model, int64 [layers, experts]; dense ones have zeros.

    Raises:
        UsageError: a layer with experts was not captured, or layers differ in their experts: zeros
            would say that nothing was routed there.
    """
    moe = [layer for layer in profile.info.layers if layer.kind == "moe"]
    missing = sorted({layer.index for layer in moe} - set(profile.layer_indices))
    if missing or not moe:
        which = f"layers {', '.join(map(str, missing))} were" if missing else "no layer was"
        raise UsageError(f"{which} not captured, and the file cannot say so: record all layers")
    if len({layer.experts for layer in moe}) > 1:
        raise UsageError("layers differ in their number of experts: write .csv instead")
    config = profile.info.model.config or {}
    indices = [layer.index for layer in profile.info.layers]
    layers = max(max(indices) + 1, int(config.get("num_hidden_layers") or 0))
    counts = np.zeros((layers, moe[0].experts), dtype=np.int64)
    counts[profile.layer_indices] = profile.counts
    return counts


def write_logical_counts(profile: Profile, path: Path) -> None:
    """SGLang's ``--init-expert-location``: ``{"logical_count": [layers][experts]}``."""
    data = {"logical_count": all_layers(profile).tolist()}
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def write_logical_count_tensor(profile: Profile, path: Path) -> None:
    """The same as a tensor, in a file of ``torch.save``."""
    import torch

    torch.save({"logical_count": torch.from_numpy(all_layers(profile))}, path)


def write_array(profile: Profile, path: Path) -> None:
    """NumPy array [layers, experts]."""
    np.save(path, all_layers(profile))


def counts_table(profile: Profile) -> pd.DataFrame:
    """One row for each phase, tag, layer and expert, also where the count is 0."""
    frames = []
    for number, (phase, tag) in enumerate(profile.totals.keys):
        for place in profile.captured:
            layer = profile.info.layers[place]
            if not profile.totals.sums["calls"][number, place]:
                continue
            counts = profile.totals.lists["counts"][number, place, : layer.experts]
            facts = {"phase": phase, "tag": tag or "", "layer": layer.index}
            frames.append(pd.DataFrame(facts | {"expert": range(len(counts)), "count": counts}))
    if not frames:
        raise UsageError("nothing was captured: record a pass, or select less narrowly")
    return pd.concat(frames, ignore_index=True)


def write_csv(profile: Profile, path: Path) -> None:
    """CSV ``phase,tag,layer,expert,count``."""
    counts_table(profile).to_csv(path, index=False, lineterminator="\n")


def write_arrow(profile: Profile, path: Path) -> None:
    """The same rows as Arrow's file format, which pandas, polars and DuckDB read."""
    import pyarrow as pa
    from pyarrow import feather

    table = pa.Table.from_pandas(counts_table(profile), preserve_index=False)
    feather.write_feather(table, str(path))


def write_parquet(profile: Profile, path: Path) -> None:
    """The same rows as Parquet."""
    counts_table(profile).to_parquet(path, index=False)


WRITERS: dict[str, Written] = {
    "trace": Written(
        "Chrome trace counters, for Perfetto", (".trace.json", ".trace.json.gz"), write_trace
    ),
    "sglang": Written("SGLang's logical counts", (".json",), write_logical_counts),
    "sglang-pt": Written("the same, for torch.load", (".pt",), write_logical_count_tensor),
    "npy": Written("NumPy array [layers, experts]", (".npy",), write_array),
    "csv": Written("CSV phase,tag,layer,expert,count", (".csv",), write_csv),
    "arrow": Written("the same as Arrow", (".arrow", ".feather"), write_arrow),
    "parquet": Written("the same as Parquet", (".parquet",), write_parquet),
}
"""By name; the first with the path's ending writes it."""


def writer_for(path: Path) -> Written | None:
    """What writes a path, by its ending; None where it is a directory's name."""
    name = path.name.lower()
    return next((one for one in WRITERS.values() if name.endswith(one.suffixes)), None)


def write(profile: Profile, path: Path, name: str | None = None) -> Path:
    """Write a profile to a file; one that is there is replaced.

    Raises:
        UsageError: nobody writes files with that ending, or the profile does not fit in, or the
            path cannot be written to.
    """
    one = WRITERS.get(name or "") if name else writer_for(path)
    if one is None and name:
        raise UsageError(f"nobody writes {name!r}: pass one of {', '.join(WRITERS)}")
    if one is None:
        endings = ", ".join(ending for each in WRITERS.values() for ending in each.suffixes)
        raise UsageError(f"{path} has an ending that nobody writes: pass one of {endings}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        one.write(profile, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written to ({error.strerror}): pass another") from None
    return path
