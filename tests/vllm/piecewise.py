"""vLLM's own compiler on the CPU.

On GPUs vLLM cuts the traced graph into pieces, compiles these, and takes them from a cache of its
own the next time. On the CPU it hands the whole graph to Inductor, and the artefact that it keeps
never loads (0.32: "'function' object has no attribute 'finalize_loading'"). What needs a warm
cache of the other kind is tested with the platform's choice undone.
"""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "compile_sizes": [],
    # These need operators that only GPU builds have.
    "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
}
"""The ``compilation_config`` that goes with it."""


def install() -> None:
    """Compile piecewise in this process from now on."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config.__func__

    def decide_piecewise(cls: Any, config: Any) -> None:
        decide(cls, config)
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE

    CpuPlatform.check_and_update_config = classmethod(decide_piecewise)
    # Rewrites calls of GPU operators, which it looks up first.
    FixFunctionalizationPass.__call__ = lambda self, graph: None
