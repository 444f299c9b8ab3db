"""A model that was compiled before the hooks came would go on without them: start it afresh."""

from __future__ import annotations

from types import CodeType

from torch import nn

MESSAGE = (
    "the model ran compiled before routeprof attached: the compiler was reset, so that its next "
    "pass is compiled again with the hooks in it"
)


def forget_compiled(model: nn.Module) -> list[str]:
    """Make torch.compile trace again, where it has compiled this model's code already.

    By default dynamo does not look at a module's hooks again once it has compiled the module:
    hooks attached afterwards would silently not run.

    Returns:
        A message for the user if something was forgotten.
    """
    import torch._dynamo as dynamo

    if not any(_has_graphs(code) for code in _codes(model)):
        return []
    dynamo.reset()
    return [MESSAGE]


def _codes(model: nn.Module) -> set[CodeType]:
    inner = getattr(model, "_orig_mod", model)
    functions: list[object] = [nn.Module._call_impl, nn.Module._wrapped_call_impl]
    functions += [type(module).forward for module in inner.modules()]
    codes = (getattr(_unwrapped(function), "__code__", None) for function in functions)
    return {code for code in codes if code is not None}


def _unwrapped(function: object) -> object:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _has_graphs(code: CodeType) -> bool:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(code))
