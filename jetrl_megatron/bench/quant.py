"""`bench quant`: every quantiser against the measured copy bandwidth, after its bytes were compared with the reference.

Enters: shapes. Leaves: a table of milliseconds, TB/s and share of the copy ceiling; exit 1 where a byte differs.
Bytes counted are the fewest that the operation can move: inputs read once, codes and scales written once.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

import jetrl_megatron.fp8.quantize as reference
from jetrl_megatron.bench.rivals import torchao_quantizers, vllm_quantizer
from jetrl_megatron.bench.timing import copy_bandwidth, machine, measure, print_table, require_cuda, write_json
from jetrl_megatron.fp8.block_scaled import BlockScaled

COLUMNS = ("kernel", "rows", "cols", "bytes equal", "ms", "p10", "p90", "TB/s", "of copy")
DEFAULT_SHAPES = ("16384x4096", "16384x12288")
EPS = 1e-6
BATCH = 8
"""Calls in one CUDA graph, between two events: the host's launch time is left out."""


@dataclass(frozen=True)
class Case:
    """One quantiser at one shape."""

    name: str
    run: Callable[[], object]
    bytes_moved: int
    expected: Callable[[], tuple[BlockScaled | torch.Tensor | None, ...]] | None = None
    """What the blocks and BF16 matrices in the result have to be, byte for byte; None where it is not ours to say."""


def cases(x: torch.Tensor) -> list[Case]:
    """The quantisers of this project on x [R, C] BF16."""
    from jetrl_megatron.fp8 import triton_quantize, triton_requantize

    size, scales = x.numel(), x.numel() // 128 * 4
    row_wise = triton_quantize.quantize(x, (1, 128))
    return [
        Case("row", lambda: triton_quantize.quantize(x, (1, 128)), 3 * size + scales, lambda: (reference.quantize(x, (1, 128)),)),
        Case("dual", lambda: triton_quantize.quantize_dual(x), 4 * size + 2 * scales, lambda: reference.quantize_dual(x)),
        Case(
            "dual, blocks",
            lambda: triton_quantize.quantize_dual(x, t_block=(128, 128)),
            4 * size + scales,
            lambda: reference.quantize_dual(x, t_block=(128, 128)),
        ),
        Case("weight", lambda: triton_quantize.quantize(x, (128, 128)), 3 * size, lambda: (reference.quantize(x, (128, 128)),)),
        Case("weight, both", lambda: triton_quantize.quantize_weight(x), 4 * size, lambda: reference.quantize_weight(x)),
        Case("transpose", lambda: triton_quantize.transpose(row_wise), 2 * size, lambda: (row_wise.transpose(),)),
        Case(
            "requantise",
            lambda: triton_requantize.requantize_transposed(row_wise),
            2 * size + 2 * scales,
            lambda: (reference.requantize_transposed(row_wise),),
        ),
    ]


def operand_cases(
    name: str, run: Callable[[tuple[int, int] | None], object], like: torch.Tensor, written: Callable[[], torch.Tensor]
) -> list[Case]:
    """An operation that ends in the operands of a linear, in each form; it reads 4 bytes an element, a norm's row being read twice.

    run: given the block of the transposed copy or None. like: [R, C] as the result. written: the BF16 result, of which the operands are.
    """
    size, scales = like.numel(), like.numel() // 128 * 4
    row, blocks = (1, 128), (128, 128)
    return [
        Case(f"{name} + dual", lambda: run(row), 6 * size + 2 * scales, lambda: reference.quantize_dual(written())),
        Case(f"{name} + dual, blocks", lambda: run(blocks), 6 * size + scales, lambda: reference.quantize_dual(written(), t_block=blocks)),
        Case(f"{name} + row", lambda: run(None), 5 * size + scales, lambda: (reference.quantize(written(), row),)),
    ]


def norm_cases(x: torch.Tensor) -> list[Case]:
    """RMSNorm of x [R, C] BF16 with a quantiser behind it; the row's sum of squares is one pass of its own."""
    from jetrl_megatron.fp8 import triton_fused

    weight = torch.randn(x.shape[1], device=x.device).bfloat16()

    def normed() -> torch.Tensor:
        rstd = triton_fused.rms_norm_quantize(x, weight, EPS)[2]
        return (x.float() * rstd * weight.float()).bfloat16()

    return operand_cases("norm", lambda t_block: triton_fused.rms_norm_quantize(x, weight, EPS, t_block=t_block), x, normed)


def swiglu_cases(x: torch.Tensor) -> list[Case]:
    """SwiGLU of C features, with and without a quantiser behind it; x [R, C] BF16 is its gradient in the backward."""
    from jetrl_megatron.fp8 import triton_fused, triton_swiglu

    rows, cols = x.shape
    size, scales = x.numel(), x.numel() // 128 * 4
    gate_up = torch.randn(rows, 2 * cols, device=x.device, dtype=torch.bfloat16)

    def activation() -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def gradient_expected() -> tuple[BlockScaled, ...]:
        return reference.quantize_dual(triton_swiglu.swiglu_backward(x, gate_up))

    return [
        *operand_cases("swiglu", lambda t_block: triton_fused.swiglu_quantize(gate_up, t_block=t_block), x, activation),
        Case("swiglu", lambda: triton_swiglu.swiglu(gate_up), 6 * size, lambda: (activation(),)),
        # No expectation: torch's exponential has another last bit. tests/gpu bounds the distance.
        Case("swiglu backward", lambda: triton_swiglu.swiglu_backward(x, gate_up), 10 * size),
        Case(
            "swiglu backward + dual",
            lambda: triton_swiglu.swiglu_backward_dual(x, gate_up),
            10 * size + 4 * scales,
            gradient_expected,
        ),
    ]


def rival_cases(x: torch.Tensor) -> list[Case]:
    """Other libraries' casts of the same matrix; 3 bytes an element each."""
    moved = 3 * x.numel() + x.numel() // 128 * 4
    found = {**torchao_quantizers(), **vllm_quantizer()}
    return [Case(name, partial(run, x), moved) for name, run in found.items()]


def flips(case: Case) -> int | None:
    """Differing elements of a case's result, codes, scales or BF16, from what they have to be; None where nothing is expected."""
    if case.expected is None:
        return None
    result = case.run()
    parts = [part for part in (result if isinstance(result, tuple) else (result,)) if _compared(part)]
    count = 0
    for got, want in zip(parts, [part for part in case.expected() if part is not None], strict=True):
        if isinstance(got, BlockScaled) and isinstance(want, BlockScaled):
            count += int((got.data.view(torch.uint8) != want.data.view(torch.uint8)).sum())
            count += int((got.scale.contiguous().view(torch.int32) != want.scale.contiguous().view(torch.int32)).sum())
        else:
            assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor), (case.name, type(got), type(want))
            count += int((got.view(torch.int16) != want.view(torch.int16)).sum())
    return count


def _compared(part: object) -> bool:
    """Blocks and BF16 matrices are compared; the FP32 statistics of a norm are not."""
    return isinstance(part, BlockScaled) or (isinstance(part, torch.Tensor) and part.dtype is torch.bfloat16)


def main(argv: list[str]) -> int:
    """Run the command; argv as in `--help`. Returns 0, or 1 where a byte differs."""
    parser = argparse.ArgumentParser(prog="jetrl bench quant", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="RxC", help=f"default: {', '.join(DEFAULT_SHAPES)}")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="", metavar="FILE", help="append one object a line")
    args = parser.parse_args(argv)
    require_cuda("bench quant")
    write_json(args.json, [])
    ceiling = copy_bandwidth()
    torch.manual_seed(0)
    rows_out: list[dict[str, object]] = []
    for shape in args.shape or DEFAULT_SHAPES:
        measured = len(rows_out)
        rows, cols = map(int, shape.split("x"))
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        for case in cases(x) + norm_cases(x) + swiglu_cases(x) + rival_cases(x):
            different = flips(case)
            timing = measure(case.run, args.repeats, batch=BATCH, graph=True)
            rate = case.bytes_moved / (timing.median_ms * 1e-3)
            equal = "" if different is None else ("yes" if different == 0 else f"{different} differ")
            rows_out.append(
                {"kernel": case.name, "rows": rows, "cols": cols, "bytes equal": equal, "ms": timing.median_ms, "p10": timing.p10_ms}
                | {"p90": timing.p90_ms, "TB/s": rate / 1e12, "of copy": rate / ceiling, "different": different, **asdict(timing)}
            )
        here = {"bench": "quant", **machine(), "copy_TBps": ceiling / 1e12}
        write_json(args.json, [{**here, **row} for row in rows_out[measured:]])
        print(f"{shape} is done", file=sys.stderr, flush=True)
    print(machine(), f"copy {ceiling / 1e12:.3f} TB/s")
    print_table("Quantisers", COLUMNS, rows_out)
    return 1 if any(row["different"] for row in rows_out) else 0
