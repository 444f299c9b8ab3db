"""The one-page plan: every way to split a model over GPUs, and what it leaves for the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import floor, isnan

from routeprof.errors import UsageError
from routeprof.plan.buffers import Pass, buffers, item_bytes
from routeprof.plan.cache import CacheBytes, cache_bytes
from routeprof.plan.hotness import Measured
from routeprof.plan.model import Model
from routeprof.plan.parameters import PARTS, Part, Weight
from routeprof.plan.precision import FORMATS, Precision, hot_count
from routeprof.plan.shape import GatedDeltaNet, Mamba, Mamba2, Mixer
from routeprof.whatif.layout import Layout, layouts

GIB = 1024**3
NAN = float("nan")
MOST_GPUS = 65536


@dataclass(frozen=True)
class Setting:
    """What is planned for.

    Attributes:
        memory: bytes of each GPU.
        length: tokens of each sequence, prompt and answer.
        batch: sequences that run at once, on all GPUs together.
        step_tokens: tokens of a forward pass on one replica at most: the engine's prefill chunk.
        reserve: share of the memory that is held back, unless what is computed needs more.
        runtime: bytes for the CUDA context, NCCL and the engine; graphs: for CUDA graphs.
        dispatch, combine: data types on the way to the experts and back.
    """

    memory: int
    length: int = 8192
    batch: int = 1
    step_tokens: int = 8192
    precision: Precision = field(default_factory=Precision)
    reserve: float = 0.25
    runtime: float = 1.0 * GIB
    graphs: float = 1.0 * GIB
    dispatch: str = "bf16"
    combine: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("memory", "length", "batch", "step_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}: pass 1 or more"
                )
        if not 0 <= self.reserve < 1:
            raise UsageError(f"reserve is {self.reserve:g}: pass a share of the memory from 0 to 1")


@dataclass(frozen=True)
class Split:
    """One layout: bytes on the fullest GPU; NaN where they are not known.

    Attributes:
        weights: of each part.
        kv, state: of the batch's sequences on that GPU.
        activations, dispatch, combine: of one forward pass.
        held_back: the larger of the reserve and of activations, buffers, graphs and runtime; at
            least so much, unless it is ``sure``.
        sure: activations are known, or cannot be more than the reserve.
        free: left for the cache; below 0 where the weights alone are too many.
        sequences: of the length that fit at once, on all GPUs together; None where not known.
        why: why the layout cannot run at all, if it cannot.
        spans_nodes: GPUs that share attention or an expert stand in several nodes.
    """

    layout: Layout
    weights: dict[Part, float]
    kv: float
    state: float
    activations: float
    dispatch: float
    combine: float
    held_back: float
    sure: bool
    free: float
    sequences: int | None
    why: str
    spans_nodes: bool

    @property
    def weights_bytes(self) -> float:
        return sum(self.weights.values())

    @property
    def cache_bytes(self) -> float:
        return self.kv + self.state

    @property
    def fits(self) -> bool | None:
        """Whether weights, the batch's cache and what is held back fit; None where not known."""
        if self.why or self.free < 0:
            return False
        if self.cache_bytes > self.free:
            return False
        return True if self.sure and not isnan(self.cache_bytes) else None


@dataclass(frozen=True)
class Plan:
    """The splits, those first that hold the most sequences.

    Attributes:
        weights: bytes of each part of the whole model, once.
        cache: bytes of one sequence, whole; None where it is not known.
    """

    model: Model
    setting: Setting
    gpus: int
    nodes: int
    weights: dict[Part, float]
    cache: CacheBytes | None
    splits: tuple[Split, ...]
    measured: Measured | None = None

    @property
    def weights_bytes(self) -> float:
        return sum(self.weights.values())


def plan(
    model: Model, setting: Setting, *, gpus: int, nodes: int = 1, measured: Measured | None = None
) -> Plan:
    """Every split of the GPUs.

    Args:
        measured: recorded loads of the experts, which else are taken to be even.

    Raises:
        UsageError: numbers below 1, or nodes that do not divide the GPUs.
    """
    if gpus < 1 or nodes < 1:
        raise UsageError(f"{gpus} GPUs on {nodes} nodes: pass 1 or more of each")
    if gpus > MOST_GPUS:
        raise UsageError(f"{gpus} GPUs are more than can be planned: pass at most {MOST_GPUS}")
    splits = [
        split(model, setting, layout, measured) for layout in layouts(gpus, model.experts, nodes)
    ]
    kept = model.kept
    return Plan(
        model=model,
        setting=setting,
        gpus=gpus,
        nodes=nodes,
        weights=_whole(model.weights, setting.precision),
        cache=None if kept is None else cache_bytes(kept, setting.length, setting.precision),
        splits=tuple(sorted(splits, key=_order)),
        measured=measured,
    )


def _order(row: Split) -> tuple[float, ...]:
    fits = 2 if row.fits else 1 if row.fits is None else 0
    moment = row.dispatch + row.combine + (0.0 if isnan(row.activations) else row.activations)
    return -fits, bool(row.why), -(row.sequences or 0), -row.free, moment, row.layout.dp


def split(
    model: Model, setting: Setting, layout: Layout, measured: Measured | None = None
) -> Split:
    """What one layout takes of each GPU's memory."""
    replica = -(-setting.batch // layout.dp)
    precision = setting.precision
    needs = buffers(model, layout, _pass(setting, replica, layout, measured))
    held = weights_on_gpu(model, layout, precision, measured)
    one = _sequence(model, setting, layout)
    computed = needs.dispatch + needs.combine + setting.graphs + setting.runtime
    reserve = setting.reserve * setting.memory
    least = 0.0 if isnan(needs.activations) else needs.activations
    held_back = max(reserve, computed + least)
    sure = not isnan(needs.activations) or computed + needs.ceiling <= reserve
    free = setting.memory - sum(held.values()) - held_back
    why = obstacle(model, layout)
    return Split(
        layout=layout,
        weights=held,
        kv=replica * one.kv,
        state=replica * one.state,
        activations=needs.activations,
        dispatch=needs.dispatch,
        combine=needs.combine,
        held_back=held_back,
        sure=sure,
        free=free,
        sequences=_sequences(free, one, layout, why) if sure or free < 0 else None,
        why=why,
        spans_nodes=max(layout.tp, layout.etp) > layout.per_node,
    )


def _pass(setting: Setting, replica: int, layout: Layout, measured: Measured | None) -> Pass:
    return Pass(
        tokens=max(setting.step_tokens, replica),
        batch=replica,
        item=item_bytes(setting.precision.small),
        dispatch=item_bytes(setting.dispatch),
        combine=item_bytes(setting.combine),
        fullest=measured.fullest(layout.ep) if measured else (),
    )


def _sequence(model: Model, setting: Setting, layout: Layout) -> CacheBytes:
    if model.kept is None:
        return CacheBytes(NAN, NAN)
    return cache_bytes(model.kept, setting.length, setting.precision, tp=layout.tp)


def _sequences(free: float, one: CacheBytes, layout: Layout, why: str) -> int | None:
    if isnan(one.total):
        return None
    if why or free < 0 or not one.total:
        return 0
    return floor(free / one.total) * layout.dp


def weights_on_gpu(
    model: Model, layout: Layout, precision: Precision, measured: Measured | None = None
) -> dict[Part, float]:
    """Bytes of each part that the fullest GPU holds.

    The GPUs of a replica share everything but the routed experts, and each replica has its own.
    Experts go by their number to expert-parallel ranks, in order, and inside of a rank by their
    inner width.
    """
    sums = dict.fromkeys(PARTS, 0.0)
    hot = _hot_slots(model, layout, precision, measured)
    for weight in model.weights:
        if weight.experts:
            sums[weight.part] += _experts(weight, layout, precision, hot.get(weight.layer, 0))
        else:
            sums[weight.part] += precision.bytes(weight, weight.on_gpu(layout.tp))
    return sums


def _experts(weight: Weight, layout: Layout, precision: Precision, hot: int) -> float:
    slots = -(-weight.experts // layout.ep)
    one = replace(weight, numbers=weight.numbers // weight.experts).on_gpu(layout.etp)
    usual = precision.bytes(weight, one)
    special = one * FORMATS[precision.hot].bytes if hot and weight.matrix else usual
    return (slots - hot) * usual + hot * special


def _hot_slots(
    model: Model, layout: Layout, precision: Precision, measured: Measured | None
) -> dict[int, int]:
    """Hot experts of each layer on the fullest rank; spread evenly where they are not known."""
    if not precision.hot or not precision.hot_experts:
        return {}
    if measured:
        counts = measured.hot_slots(precision.hot_experts, layout.ep)
        return dict(zip((at for at, _ in model.moes), counts, strict=True))
    return {
        at: -(-hot_count(moe.experts, precision.hot_experts) // layout.ep) for at, moe in model.moes
    }


def _whole(weights: Iterable[Weight], precision: Precision) -> dict[Part, float]:
    sums = dict.fromkeys(PARTS, 0.0)
    for weight in weights:
        numbers, hot = weight.numbers, 0
        if weight.experts and weight.matrix and precision.hot:
            each = numbers // weight.experts
            hot = each * hot_count(weight.experts, precision.hot_experts)
        sums[weight.part] += precision.bytes(weight, numbers - hot)
        sums[weight.part] += hot * FORMATS[precision.hot].bytes if hot else 0.0
    return sums


def obstacle(model: Model, layout: Layout) -> str:
    """Why engines could not run the layout, or nothing: heads and widths must divide evenly."""
    if model.shape is None:
        return ""
    for heads, what in sorted(
        {_heads(mixer) for one in model.shape.layers for mixer in one.mixers}
    ):
        if heads % layout.tp:
            return f"{heads} {what} do not divide by TP {layout.tp}"
    for _, moe in model.moes:
        if moe.width % layout.etp:
            return f"experts of width {moe.width} do not divide by TP {layout.etp}"
    return ""


def _heads(mixer: Mixer) -> tuple[int, str]:
    if isinstance(mixer, GatedDeltaNet):
        return mixer.key_heads, "heads of the delta net"
    if isinstance(mixer, Mamba2):
        return mixer.heads, "heads of Mamba2"
    if isinstance(mixer, Mamba):
        return mixer.inner, "channels of Mamba"
    return mixer.heads, "heads of attention"
