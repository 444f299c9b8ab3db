"""Rates of common GPUs and their links, as their makers state them: peaks, not what is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

from routeprof.errors import UsageError

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Hardware:
    """What a GPU can do at best.

    Attributes:
        flops: dense matrix operations a second in 16 bits (a multiply and an add are two).
        flops_8bit: the same in 8 bits.
        memory: bytes a second between the GPU and its own memory.
        inside, between: bytes a second that a GPU sends, and receives at the same time, to GPUs of
            its node and of other nodes.
        latency: seconds that each exchange takes on top.
        source: where the figures come from.
    """

    flops: float
    flops_8bit: float
    memory: float
    inside: float
    between: float
    latency: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        rates = (self.flops, self.flops_8bit, self.memory, self.inside, self.between)
        if not all(0 < rate < float("inf") for rate in rates) or not 0 <= self.latency < 1:
            raise UsageError("a rate of the hardware is not positive: pass numbers above 0")

    def flops_of(self, weight: float) -> float:
        """Operations a second with weights of so many bytes: in 8 bits where they are no wider."""
        return self.flops_8bit if weight <= 1 else self.flops

    def with_rates(self, **rates: float | None) -> Hardware:
        """The same with other rates; None keeps one.

        Raises:
            UsageError: a rate that is not positive.
        """
        given = {name: rate for name, rate in rates.items() if rate is not None}
        if "flops" in given:
            given.setdefault("flops_8bit", given["flops"])
        return replace(self, **given, source="as given, else " + self.source) if given else self


def _nvidia(flops: float, flops_8bit: float, memory: float, nvlink: float, name: str) -> Hardware:
    """NVLink's figure is of both directions; the network is 400 Gb/s (ConnectX-7) for each GPU."""
    return Hardware(
        flops * TERA,
        flops_8bit * TERA,
        memory * TERA,
        nvlink / 2 * GIGA,
        50 * GIGA,
        source=f"NVIDIA {name} data sheet; network: one ConnectX-7 400 Gb/s for each GPU",
    )


HARDWARE = {
    "a100": Hardware(
        312 * TERA,
        312 * TERA,  # no 8-bit floating point
        2.039 * TERA,
        300 * GIGA,
        25 * GIGA,
        source="NVIDIA A100 80GB SXM data sheet; network: one ConnectX-6 200 Gb/s for each GPU",
    ),
    "h100": _nvidia(989.4, 1978.9, 3.35, 900, "H100 SXM"),
    "h200": _nvidia(989.4, 1978.9, 4.8, 900, "H200 SXM"),
    "h20": _nvidia(148, 296, 4.0, 900, "H20"),
    "h800": Hardware(
        989.4 * TERA,
        1978.9 * TERA,
        3.35 * TERA,
        160 * GIGA,
        50 * GIGA,
        source="H100's rates; links as DeepEP's README measures them at most: 160 and 50 GB/s",
    ),
    "b200": _nvidia(2250, 4500, 8.0, 1800, "B200 (HGX)"),
    "mi300x": Hardware(
        1307.4 * TERA,
        2614.9 * TERA,
        5.3 * TERA,
        448 * GIGA,
        50 * GIGA,
        source="AMD Instinct MI300X data sheet, 7 links of 64 GB/s each way; network: 400 Gb/s",
    ),
}


def hardware(name: str) -> Hardware:
    """A common GPU by its name.

    Raises:
        UsageError: a name that is not known.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        raise UsageError(f"GPU {name!r} is not one of {', '.join(HARDWARE)}: pass one of them")
    return found
