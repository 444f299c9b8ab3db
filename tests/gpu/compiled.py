"""Compile the fused kernels for CUDA devices on a machine that has none: ``python -m …``.

The host code runs with tensors on the CPU, as far as the launch; what it would launch is handed
to Triton's compiler, whose own ptxas makes machine code of it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from routeprof.capture import fused
from routeprof.capture.kernels import StepConstants
from tests.gpu.reference import by_kernel, layout_of, random_call, random_rows

ARCHITECTURES = (80, 90)
WHOLE = {"rows": 3, "tokens": 40, "gate": True, "logits": True, "weights": True}


class Compiler:
    """Stands in for a kernel: compiles for each architecture instead of launching."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        return self.launch

    def launch(self, *values, **options) -> None:
        signature, constants = {}, {}
        for parameter, value in zip(self.kernel.params, values, strict=True):
            one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            unchanging = parameter.is_constexpr or value is None or one
            signature[parameter.name] = "constexpr" if unchanging else mangle_type(value)
            if unchanging:
                constants[parameter.name] = value
        source = ASTSource(self.kernel, signature, constants)
        for architecture in ARCHITECTURES:
            target = GPUTarget("cuda", architecture, 32)
            code = triton.compile(source, target=target, options=options).asm["cubin"]
            print(f"{self.kernel.__name__} sm_{architecture}: {len(code)} bytes")


def main() -> None:
    fused._count_layer = Compiler(fused._count_layer)
    fused._fold_steps = Compiler(fused._fold_steps)
    random = np.random.default_rng(0)
    for scoring, experts, valid in (
        ("softmax", 128, None),
        ("sigmoid", 256, torch.bool),
        ("sqrtsoftplus", 60, torch.int64),
        ("probabilities", 8, None),
    ):
        fixed = {"scoring": scoring, "experts": experts, "valid": valid}
        by_kernel(random_call(random, **WHOLE, **fixed))
    by_kernel(random_call(random, gate=False, rows=None, valid=None, tokens=0))
    layout = layout_of((128, 8), (60, 4))
    rows, slots = torch.from_numpy(random_rows(random, layout, 3)), torch.zeros(3).long()
    totals = torch.zeros(layout.slots, 2, layout.int_width, dtype=torch.int64)
    constants = StepConstants(layout, torch.device("cpu"))
    fused.fold_steps(totals, totals[..., 0].double(), rows, slots, layout, constants)


if __name__ == "__main__":
    main()
