"""Other tools' files: routing that was recorded elsewhere, as recordings of our own.

`recognised` says which tool wrote a file, `read` what is in it, and `convert` makes a recording of
it. `routeprof.converted.as_recording` does so for every verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from routeprof.errors import UsageError
from routeprof.formats import (
    cdmoe,
    esft,
    imatrix,
    mbolt,
    megatron,
    moe_trace,
    moecap,
    responses,
    route_log,
    sglang,
    tables,
    trtllm,
)
from routeprof.formats.opening import reason_of
from routeprof.formats.refused import why_refused
from routeprof.formats.source import Source, Told
from routeprof.recording.schema import INFO_FILE
from routeprof.topology import PHASES

__all__ = ["FORMATS", "Format", "Told", "convert", "read", "recognised"]


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        about: what it is, for the list of formats.
        recognises: whether a path, a file or a directory, is of this kind, by its name and its
            first bytes.
        read: what it holds.
        together: several files are ranks or pieces of one run, and read at once.
        asks: ``read`` takes what the user told, too.
    """

    about: str
    recognises: Callable[[Path], bool]
    read: Callable[..., Source]
    together: bool = False
    asks: bool = False


FORMATS: dict[str, Format] = {
    "sglang": Format(
        "SGLang's expert distribution recorder, .pt or .json",
        sglang.is_sglang,
        sglang.read_sglang,
        together=True,
    ),
    "responses": Format(
        "API responses of vLLM and SGLang with routed experts, JSON or JSON lines",
        responses.is_responses,
        responses.read_responses,
        together=True,
        asks=True,
    ),
    "vllm-log": Format(
        "a patched vLLM's log of routes, JSON lines",
        route_log.is_route_log,
        route_log.read_route_log,
        asks=True,
    ),
    "esft": Format(
        "ESFT's expert_weights_<layer>.txt",
        esft.is_esft,
        esft.read_esft,
        together=True,
        asks=True,
    ),
    "cd-moe": Format(
        "CD-MoE's sums of weights, .json", cdmoe.is_cdmoe, cdmoe.read_cdmoe, asks=True
    ),
    "trtllm": Format(
        "TensorRT-LLM's expert statistics, the directory", trtllm.is_trtllm, trtllm.read_trtllm
    ),
    "imatrix": Format(
        "llama.cpp's importance matrix, .gguf", imatrix.is_imatrix, imatrix.read_imatrix
    ),
    "megatron": Format(
        "Megatron-core's router traces, router_trace_rank<rank>.jsonl or their directory",
        megatron.is_megatron,
        megatron.read_megatron,
        together=True,
        asks=True,
    ),
    "moe-cap": Format(
        "MoE-CAP's records, which have no counts: says so", moecap.is_moecap, moecap.read_moecap
    ),
    "mbolt": Format("mbolt's trace of llama.cpp", mbolt.is_mbolt, mbolt.read_mbolt),
    "moe-trace": Format(
        "CSV layer,expert of llama.cpp's moe-trace",
        moe_trace.is_moe_trace,
        moe_trace.read_moe_trace,
        asks=True,
    ),
    "npy": Format("NumPy array [layers, experts] or [steps, …]", tables.is_npy, tables.read_npy),
    "csv": Format("CSV layer,expert,count", tables.is_csv, tables.read_csv),
}
"""By name; the first that recognises a file reads it."""


def recognised(path: Path) -> str | None:
    """Name of the format that a path is of; None for a recording, or what nobody knows.

    Raises:
        UsageError: there is nothing at that path, or it must not be read.
    """
    try:
        return next((name for name, one in FORMATS.items() if one.recognises(path)), None)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): pass another path") from None


def read(paths: Sequence[Path], name: str, told: Told | None = None) -> Source:
    """What is in some files of a format.

    Raises:
        UsageError: they cannot be read, or what was told contradicts them.
    """
    if name not in FORMATS:
        raise UsageError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    told = told or Told()
    for fact, number in (("top_k", told.top_k), ("layers", told.layers), ("experts", told.experts)):
        if number is not None and number < 1:
            raise UsageError(f"{fact} is {number}: pass 1 or more")
    try:
        one = FORMATS[name]
        return _with(one.read(paths, told) if one.asks else one.read(paths), told)
    except (OSError, UnicodeDecodeError, MemoryError) as error:
        reason = reason_of(error)
        raise UsageError(f"{paths[0]} cannot be read ({reason}): pass another copy") from None


def convert(
    paths: Sequence[Path], directory: Path, name: str | None = None, told: Told | None = None
) -> Path:
    """Make a recording of files; returns its directory.

    Raises:
        UsageError: as ``read``; or nobody knows what the files are.
        RecordingExistsError: the directory holds something already.
    """
    from routeprof.formats.recorded import write_recording

    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist: pass a file")
    known = name or recognised(paths[0])
    if known is None and (paths[0] / INFO_FILE).exists():
        raise UsageError(
            f"{paths[0]} is a recording already: end what is to be made of it in .json, .npy, …"
        )
    if known is None and (reason := why_refused(paths[0])):
        raise UsageError(f"{paths[0]} {reason}")
    if known is None:
        raise UsageError(
            f"{paths[0]} is of no known kind: pass --from, one of {', '.join(FORMATS)}"
        )
    return write_recording(read(paths, known, told), directory)


def _with(source: Source, told: Told) -> Source:
    """The source with what was told."""
    layers = source.layers
    if told.top_k is not None:
        layers = tuple(
            replace(layer, top_k=told.top_k) if layer.top_k is None else layer for layer in layers
        )
        for layer in layers:
            if layer.kind == "moe" and not 1 <= told.top_k <= layer.experts:
                raise UsageError(f"top_k is {told.top_k}: pass 1 to {layer.experts}")
    if told.phase is not None and told.phase not in PHASES:
        raise UsageError(f"phase {told.phase!r} is not one of {', '.join(PHASES)}")
    if told.phase is None and told.tag is None:
        return replace(source, layers=layers)
    steps = (
        replace(
            step,
            phase=told.phase if told.phase and step.phase == "unknown" else step.phase,
            tag=step.tag or told.tag,
        )
        for step in source.steps
    )
    return replace(source, layers=layers, steps=steps)
