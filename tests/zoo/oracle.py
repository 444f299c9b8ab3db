"""What the experts of a model really executed, seen from the tensor operations they use.

While the model runs every torch call is watched, along with the module that makes it. Ids come
from the operation that spreads rows over experts, never from a module's arguments or outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.zoo.families import BY_TYPE, Family, quiet


@dataclass
class Truth:
    """Keys are paths of experts modules, or of their block where a family has no such module."""

    family: Family
    counts: dict[str, Tensor] = field(default_factory=dict)
    # The chosen experts of every row, [rows, k], -1 if dropped; unknown under grouped_mm.
    ids: dict[str, Tensor] = field(default_factory=dict)
    # What the experts' outputs were multiplied by, in the last call; in eager loops only.
    weights: dict[str, Tensor] = field(default_factory=dict)
    # Rows that met each expert's weights, where that is not what the router chose.
    reached: dict[str, Tensor] = field(default_factory=dict)
    _first_choices: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def choose(self, layer: str, ids: Tensor) -> None:
        self.ids[layer] = torch.cat([self.ids[layer], ids]) if layer in self.ids else ids.clone()

    def count(self, layer: str, counts: Tensor) -> None:
        self.counts[layer] = self.counts.get(layer, 0) + counts.long()

    def reach(self, layer: str, counts: Tensor) -> None:
        self.reached[layer] = self.reached.get(layer, 0) + counts.long()

    def dispatch(self, layer: str, ids: Tensor) -> None:
        self.choose(layer, ids)
        self.count(layer, self.histogram(ids))

    def choose_in_turn(self, layer: str, ids: Tensor) -> None:
        """Called once with the first choices of all rows, then with the second ones."""
        if layer in self._first_choices:
            self.dispatch(layer, torch.stack([self._first_choices.pop(layer), ids], dim=1))
        else:
            self._first_choices[layer] = ids

    def histogram(self, ids: Tensor) -> Tensor:
        return ids[ids >= 0].long().bincount(minlength=self.family.experts)


@dataclass
class Call:
    """A torch call made in the forward of the module at `path`, but in none of its children's."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    result: Any
    truth: Truth

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def sibling(self) -> str:
        return f"{self.parent}.experts"

    @property
    def owner(self) -> str:
        return type(self.module).__name__

    @property
    def in_experts(self) -> bool:
        return self.path.rpartition(".")[2] == "experts"


def _one_hot(call: Call) -> None:
    ids, truth = call.args[0], call.truth
    if call.owner == "SwitchTransformersTop1Router":
        truth.choose(call.sibling, ids.reshape(-1, 1))
    elif call.owner == "ZayaExperts":
        truth.reach(call.path, truth.histogram(ids))
    # The ids of nllb's experts module are a mask of the first choices, not ids.
    elif call.in_experts and call.owner != "NllbMoeExperts":
        truth.dispatch(call.path, ids)


def _cumsum(call: Call) -> None:
    """nllb fills experts up with the masks of first and second choices, without padding."""
    if call.owner == "NllbMoeTop2Router":
        mask = call.args[0]
        ids = torch.where(mask.any(dim=1), mask.argmax(dim=1), -1)
        call.truth.choose_in_turn(call.sibling, ids)


def _histc(call: Call) -> None:
    if call.owner == "ZayaExperts":
        call.truth.reach(call.path, nn.functional.pad(call.result, (0, 1)))
    elif call.in_experts:
        call.truth.count(call.path, call.result)


def _getitem(call: Call) -> None:
    """batched_mm gathers weights by all ids at once; eager loops gather a row's weight."""
    tensor, index = call.args
    if not call.in_experts:
        return
    if isinstance(index, tuple) and index[-1] is None and tensor.ndim == 2:
        call.truth.weights[call.path] = tensor
    elif tensor is getattr(call.module, "down_proj", None) and _is_vector(index):
        if call.owner == "ZayaExperts":
            call.truth.reach(call.path, call.truth.histogram(index))
        else:
            call.truth.dispatch(call.path, index.view(-1, call.truth.family.top_k))


def _is_vector(index: Any) -> bool:
    return isinstance(index, Tensor) and index.ndim == 1


def _linear(call: Call) -> None:
    """The first layer of an expert that is a module of its own."""
    if match := re.fullmatch(r"(.+)\.expert_(\d+)\.(wi|fc1)", call.path):
        layer, expert, kind = match.groups()
        counts = torch.zeros(call.truth.family.experts, dtype=torch.long)
        counts[int(expert)] = len(call.args[0])
        record = call.truth.count if kind == "wi" else call.truth.reach
        record(layer, counts)


def _sigmoid(call: Call) -> None:
    """llama4 scores what it has not chosen with the sigmoid of minus infinity."""
    if call.owner == "Llama4Router":
        chosen = call.result > 0
        call.truth.dispatch(call.sibling, chosen.nonzero()[:, 1].view(len(chosen), -1))
        call.truth.weights[call.sibling] = call.result[chosen].view(len(chosen), -1)


def _softmax(call: Call) -> None:
    if call.owner == "JetMoeTopKGating":
        call.truth.weights[call.parent] = call.result


def _topk(call: Call) -> None:
    if call.owner == "ZayaRouter":
        call.truth.dispatch(call.sibling, call.result.indices.flatten(0, 1))
    elif call.owner == "JetMoeTopKGating":
        call.truth.choose(call.parent, call.result.indices)


def _split(call: Call) -> None:
    if call.owner == "JetMoeParallelExperts" and call.path.endswith("input_linear"):
        call.truth.count(call.parent, torch.tensor(call.args[1]))


def _embedding(call: Call) -> None:
    if call.path.endswith(".up_embed"):
        call.truth.dispatch(call.parent, call.args[0])


WITNESSES: dict[Callable[..., Any], Callable[[Call], None]] = {
    nn.functional.one_hot: _one_hot,
    torch.cumsum: _cumsum,
    torch.histc: _histc,
    Tensor.__getitem__: _getitem,
    nn.functional.linear: _linear,
    Tensor.sigmoid: _sigmoid,
    torch.softmax: _softmax,
    torch.topk: _topk,
    Tensor.topk: _topk,
    Tensor.split: _split,
    nn.functional.embedding: _embedding,
}


class _Watch(TorchFunctionMode):
    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.running: list[tuple[str, nn.Module]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        witness = WITNESSES.get(function)
        if witness and self.running:
            witness(Call(*self.running[-1], args, result, self.truth))
        return result

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module whose forward is running.

        Hooks would not do: what other hooks compute must not count as the module's own calls.
        """
        with ExitStack() as patches:
            for path, module in model.named_modules():
                patches.enter_context(patch.object(module, "forward", self._entering(path, module)))
            yield

    def _entering(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @wraps(forward)
        def entered(*args: Any, **kwargs: Any) -> Any:
            self.running.append((path, module))
            try:
                return forward(*args, **kwargs)
            finally:
                self.running.pop()

        return entered


@contextmanager
def oracle(model: nn.Module) -> Iterator[Truth]:
    """Truth about every row the model executes inside the block, padding included."""
    truth = Truth(BY_TYPE[model.config.model_type])
    watch = _Watch(truth)
    with quiet(), torch.no_grad(), watch.following(model), watch:
        yield truth


def unpadded_counts(
    model: nn.Module, family: Family, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Counts of every row run on its own, without its padding."""
    with oracle(model) as truth:
        for row, mask in enumerate(inputs["attention_mask"].bool()):
            model(**{name: _unpadded(name, value[row], mask) for name, value in inputs.items()})
    return truth.counts


def _unpadded(name: str, row: Tensor, mask: Tensor) -> Tensor:
    return (row if name.startswith("decoder_") else row[mask])[None]


def masked_counts(truth: Truth, mask: Tensor) -> dict[str, Tensor]:
    """Counts of the rows that `mask` keeps; layers with other rows (a decoder's) keep them all."""
    counts = {}
    for layer, ids in truth.ids.items():
        passes, rest = divmod(len(ids), mask.numel())
        keep = slice(None) if rest else mask.bool().flatten().repeat(passes)
        counts[layer] = truth.histogram(ids[keep])
    return counts
