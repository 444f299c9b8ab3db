"""Loads of many kinds, and the sizes of clusters to place them on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = ("zipf", "bimodal", "hot", "uniform", "lognormal", "drifting", "wandering", "topics")
EXPERTS = (8, 16, 32, 60, 64, 128, 160, 256, 384, 512)
GPUS = (4, 8, 16, 32, 64, 72, 144, 320)


@dataclass(frozen=True)
class Case:
    """A recording to fit on, one to judge on, and a cluster of equal GPUs."""

    name: str
    fit: np.ndarray
    held_out: np.ndarray
    gpus: int
    slots: int


def case(seed: int, layers: int = 3) -> Case:
    """The case of a number: kinds in turn, everything else at random."""
    random = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    experts, gpus, slots = _sizes(random)
    steps = int(random.choice([4, 8, 16, 32, 64]))
    tokens = int(random.choice([2_048, 16_384, 131_072, 1_600_000]))
    shares = _shares(kind, random, 2 * steps, layers, experts)
    loads = random.poisson(shares * tokens).astype(np.float64)
    name = f"{seed} {kind} {experts}x{gpus}+{slots - experts} T{steps} N{tokens}"
    return Case(name, loads[:steps], loads[steps:], gpus, slots)


def _sizes(random: np.random.Generator) -> tuple[int, int, int]:
    while True:
        experts, gpus = int(random.choice(EXPERTS)), int(random.choice(GPUS))
        slots = -(-(experts + int(random.integers(65))) // gpus) * gpus
        if slots - experts <= 64 and slots // gpus <= experts:
            return experts, gpus, slots


def _shares(
    kind: str, random: np.random.Generator, steps: int, layers: int, experts: int
) -> np.ndarray:
    shape = layers, experts
    one = np.ones(shape)
    if kind == "zipf":
        one = random.permuted(np.tile(1 / np.arange(1, experts + 1), (layers, 1)), axis=1)
    elif kind == "bimodal":
        one = np.where(random.random(shape) < 0.2, 6.0, 1.0)
    elif kind == "hot":
        one[:, random.integers(experts)] = experts * random.uniform(0.1, 1)
    elif kind == "lognormal":
        one = random.lognormal(0, 1, shape)
    loads = np.tile(one, (steps, 1, 1))
    if kind == "drifting":
        way = np.linspace(0, 1, steps)[:, np.newaxis, np.newaxis]
        loads = (1 - way) * random.lognormal(0, 0.8, shape) + way * random.lognormal(0, 0.8, shape)
    elif kind == "wandering":
        loads = np.exp(np.cumsum(random.normal(0, 0.05, (steps, *shape)), axis=0))
    elif kind == "topics":
        loads = random.lognormal(0, 1, (4, *shape))[random.integers(4, size=steps)]
    return loads / loads.sum(axis=2, keepdims=True)
