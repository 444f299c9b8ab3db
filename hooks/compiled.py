"""A model that was compiled before the hooks came would go on without them: start it afresh."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

from torch import nn

MESSAGE = (
    "the model, or one that shares its code, ran compiled before routeprof attached: the compiler "
    "was reset, so that the next pass is compiled again with the hooks in it"
)


def forget_compiled(model: nn.Module) -> list[str]:
    """Make torch.compile trace again, where it has compiled this model's code already.

    By default dynamo does not look at a module's hooks again once it has compiled the module:
    hooks attached afterwards would silently not run.

    Returns:
        A message for the user if something was forgotten.
    """
    import torch._dynamo as dynamo

    if not has_graphs(model):
        return []
    dynamo.reset()
    return [MESSAGE]


def has_graphs(model: nn.Module) -> bool:
    """Whether dynamo holds a graph of this model's code."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return any(_debug_get_cache_entry_list(code) for code in _codes(model))


def _codes(model: nn.Module) -> set[CodeType]:
    from torch._dynamo.external_utils import wrap_inline

    inner = getattr(model, "_orig_mod", model)
    # Where dynamo would not look into a forward, as under torch.no_grad, it wraps the call.
    functions: list[object] = [wrap_inline(inner)]
    functions += [nn.Module._call_impl, nn.Module._wrapped_call_impl]
    functions += [type(module).forward for module in inner.modules()]
    layers = (layer for function in functions for layer in _wrapped_layers(function))
    codes = (getattr(layer, "__code__", None) for layer in layers)
    return {code for code in codes if code is not None}


def _wrapped_layers(function: object) -> Iterator[object]:
    """A function and what its decorators wrap: dynamo keeps graphs with the outermost it traced."""
    yield function
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        yield function
