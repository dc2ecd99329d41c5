"""`bench step` counts every Triton kernel of the FP8 package under the kind that it belongs to."""

import ast
import re
from pathlib import Path

from jetrl_megatron.bench.step import KINDS

FP8 = Path(__file__).parents[3] / "jetrl_megatron" / "fp8"


def launched_kernels():
    """Names of the functions that some file of the package launches on a grid, `name[grid](...)`."""
    calls = [n for path in FP8.glob("*.py") for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    return {n.func.value.id for n in calls if isinstance(n.func, ast.Subscript) and isinstance(n.func.value, ast.Name)}


def test_every_kernel_has_its_kind():
    kinds = {name: next((kind for kind, pattern in KINDS if re.search(pattern, name)), None) for name in launched_kernels()}
    others = dict.fromkeys(("swiglu_kernel", "swiglu_backward_kernel"), "swiglu")
    others |= dict.fromkeys(("norm_kernel", "norm_backward_kernel", "norm_dw_kernel"), "norm")
    assert {name: kind for name, kind in kinds.items() if kind != "quantise"} == others
    assert {"row_kernel", "tile_kernel", "_accumulate_kernel"} <= set(kinds)
