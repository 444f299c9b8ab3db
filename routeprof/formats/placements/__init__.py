"""Placements of experts in the files of engines and balancers, in and out.

Layers, slots and experts are those of an `ExpertMap`; what a file leaves open (numbers of layers,
GPUs) is taken from the `Deployment` that it is read for, and what it says must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from routeprof.errors import UsageError
from routeprof.formats.placements import arrays, ascend, csv, sglang, trtllm
from routeprof.formats.placements.expert_map import Deployment, ExpertMap, in_order
from routeprof.formats.placements.rows import read_json

__all__ = [
    "FORMATS",
    "Deployment",
    "ExpertMap",
    "Written",
    "chosen_formats",
    "in_order",
    "read_placement",
    "write_placement",
]

Writer = Callable[[ExpertMap, Path], None]
Reader = Callable[[Path, Deployment], ExpertMap]

FORMATS: dict[str, dict[str, Writer]] = {
    "sglang": {"sglang.json": sglang.write_json, "sglang.pt": sglang.write_pt},
    "trtllm": {"trtllm.yaml": trtllm.write},
    "vllm": {"vllm.npz": arrays.write_vllm},
    "eplb": {"eplb.npz": arrays.write_eplb},
    "vllm-ascend": {"vllm-ascend.json": ascend.write},
    "csv": {"placement.csv": csv.write},
}
"""For each format the names of its files, and what writes them."""


@dataclass(frozen=True)
class Written:
    """Attributes: files; left_out: name of a file that the placement does not fit in, and why."""

    files: tuple[Path, ...]
    left_out: dict[str, str]


def chosen_formats(text: str | None) -> tuple[str, ...] | None:
    """Names of formats, separated by commas; None for all.

    Raises:
        UsageError: there is no such format.
    """
    if text is None:
        return None
    return _known(tuple(dict.fromkeys(name.strip() for name in text.split(","))))


def write_placement(
    placement: ExpertMap, directory: str | Path, formats: Sequence[str] | None = None
) -> Written:
    """Write a placement to a directory, which is made; files of the same name are replaced.

    Args:
        formats: of ``FORMATS``; None for all that the placement fits in.

    Raises:
        UsageError: a format that was asked for cannot hold the placement, or there is no such
            format, or the directory cannot be written to.
    """
    files: list[Path] = []
    left_out: dict[str, str] = {}
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name in _known(tuple(FORMATS if formats is None else formats)):
            for file, write in FORMATS[name].items():
                try:
                    write(placement, Path(directory) / file)
                except UsageError as error:
                    if formats is not None:
                        raise
                    left_out[file] = str(error)
                else:
                    files.append(Path(directory) / file)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written to ({error.strerror}): pass another directory"
        ) from None
    return Written(tuple(files), left_out)


def read_placement(path: str | Path, deployment: Deployment) -> ExpertMap:
    """Read a placement from a file of any of the formats, known by its ending and its keys.

    Nothing is unpickled but tensors. A .npy file may be a bare map or Omni's pattern.

    Raises:
        UsageError: it cannot be read, is no placement, or is one for another model or other GPUs.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise UsageError(f"{file} is of no known kind: pass {', '.join(_READERS)}")
    return reader(file, deployment)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return names


def _read_json(path: Path, deployment: Deployment) -> ExpertMap:
    data = read_json(path)
    if isinstance(data, dict) and "layer_list" in data:
        return ascend.of_data(path, data, deployment)
    return sglang.of_data(path, data, deployment)


_READERS: dict[str, Reader] = {
    ".json": _read_json,
    ".pt": sglang.read_pt,
    ".yaml": trtllm.read,
    ".yml": trtllm.read,
    ".npz": arrays.read_npz,
    ".npy": arrays.read_npy,
    ".csv": csv.read,
}
