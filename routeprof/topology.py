"""What is measured: layers, their routers, and the part a rank plays. Facts only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from routeprof.errors import NotKnownError

PHASES = ("prefill", "decode", "mixed", "draft", "verify", "unknown")
"""Phases of a step, in the order in which recordings and tables list them."""

LEVELS = ("windows", "steps", "tokens")
"""Recording levels; each contains the ones before it."""

LayerKind = Literal["moe", "dense"]
RouterKind = Literal["softmax", "sigmoid", "sqrtsoftplus", "hash", "unknown"]
GateOutput = Literal["logits", "probabilities", "none"]


@dataclass(frozen=True)
class Layer:
    """One layer of the model, as found when the hooks were attached.

    Attributes:
        index: the layer's number in the model; unique within a recording.
        name: path of the module, such as ``model.layers.3.mlp``.
        kind: ``moe``, or ``dense`` for a block without routed experts.
        experts: number of experts a token can be sent to, zero experts included; 0 for dense.
        top_k: experts per token; 0 for dense, None where a converted file does not say.
        router: how the router turns logits into scores.
        gate: what the router hands out: ``logits``, ``probabilities``, or ``none`` where it
            hands out nothing or does not choose by it (hash routing).
        unsupported: why the layer could not be hooked; empty when it was.
        shared_experts: experts that see every token; never counted as routed.
        zero_experts: the last so many experts do no work (identity experts).
        sees_all_tokens: False where the model itself sends the layer only some tokens (one
            modality), so that coverage cannot be told from the size of the batch.
        drops: the engine really drops assignments above a capacity.
        executed: False where the counts are the router's intent, not what the experts ran.
        note: what a reader must know about this layer's numbers.
    """

    index: int
    name: str
    kind: LayerKind = "moe"
    experts: int = 0
    top_k: int | None = 0
    router: RouterKind = "unknown"
    gate: GateOutput = "none"
    unsupported: str = ""
    shared_experts: int = 0
    zero_experts: int = 0
    sees_all_tokens: bool = True
    drops: bool = False
    executed: bool = True
    note: str = ""

    @property
    def choices(self) -> int:
        """``top_k``, for what cannot be computed without.

        Raises:
            NotKnownError: it is not known.
        """
        if self.top_k is None:
            raise NotKnownError(
                f"how many experts a token has in layer {self.index} is not known; convert the "
                "file again with --top-k"
            )
        return self.top_k


@dataclass(frozen=True)
class RankRole:
    """The part one process plays in a parallel group.

    ``owns_tokens`` is False for a twin that sees the same tokens as another rank (tensor
    parallelism): its counts are kept, and left out of sums.
    """

    rank: int = 0
    world_size: int = 1
    tp: int = 0
    dp: int = 0
    ep: int = 0
    pp: int = 0
    owns_tokens: bool = True


@dataclass(frozen=True)
class ModelInfo:
    """What the recording says about the model and the engine that runs it.

    Attributes:
        hidden_size: width of a token.
        expert_width: inner width of a routed expert; None where nobody said.
        config: what the model's config.json says, with the defaults that it leaves out; None where
            there is no such configuration.
    """

    name: str = ""
    model_type: str = ""
    hidden_size: int | None = None
    dtype: str = ""
    engine: str = ""
    engine_version: str = ""
    device: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    expert_width: int | None = None
    config: dict[str, Any] | None = None
