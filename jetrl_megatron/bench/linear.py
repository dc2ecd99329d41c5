"""`bench linear`: forward and backward of a linear layer, all quantisation included, against BF16 and other libraries.

Enters: model names. Leaves: milliseconds for each of a decoder layer's four linears and their sum, the speed-up over BF16 in the same
autograd frame, and beside it the bound: DeepGEMM's three GEMMs alone. Exit 1 where a result is too far from float64.
Two frames: `grad` returns dW in BF16 as autograd's gradient; `main_grad` adds it into an FP32 buffer, as training does. In both, ours
quantises X, dY *and* W (with its transpose) in every iteration, although training quantises W once a step; `cached` leaves W out.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from jetrl_megatron.bench.rivals import Linear, torchao_linear, transformer_engine_linear
from jetrl_megatron.bench.shapes import MODELS
from jetrl_megatron.bench.timing import Timing, calc_diff, machine, measure, print_table, require_cuda, write_json
from jetrl_megatron.config import Backend, ScaleFormat, WgradGranularity
from jetrl_megatron.fp8 import GemmPrecision, QuantizedWeight, bf16_linear, fp8_linear
from jetrl_megatron.fp8.backend import kernels_of
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import WEIGHT_BLOCK

GEMMS = ("fprop", "dgrad", "wgrad groups", "wgrad blocks")
E4M3 = torch.float8_e4m3fn
LIMIT = 1e-5
"""Largest calc_diff of a GEMM from the float reference on its own dequantised operands."""


@dataclass(eq=False)
class Problem:
    """One linear layer with its tensors on the GPU."""

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor

    @classmethod
    def make(cls, toks: int, n: int, k: int) -> "Problem":
        """Random operands: x [toks, K], weight [N, K], dy [toks, N], BF16."""
        x, weight, dy = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((toks, k), (n, k), (toks, n)))
        return cls(x.requires_grad_(), torch.nn.Parameter(weight * k**-0.5), dy)

    def add_main_grad(self) -> torch.Tensor:
        """Give the weight the FP32 buffer that Megatron gives it, zeroed; returns it."""
        self.weight.main_grad = torch.zeros(self.weight.shape, dtype=torch.float32, device="cuda")  # type: ignore[attr-defined]
        return self.weight.main_grad  # type: ignore[attr-defined, no-any-return]

    def drop_main_grad(self) -> None:
        """Take the buffer away again."""
        del self.weight.main_grad  # type: ignore[attr-defined]

    def step(self, forward: Linear) -> None:
        """One forward and backward; gradients of the last iteration are dropped first."""
        self.x.grad = self.weight.grad = None
        forward(self.x).backward(self.dy)


def quantized(weight: torch.Tensor) -> QuantizedWeight:
    """The weight's bytes and their transpose, by the GPU quantiser."""
    pair = kernels_of(Backend.deepgemm).quantize_weight(weight.detach(), scale_format=ScaleFormat.fp32, with_transpose=True)
    return QuantizedWeight(*pair)


def both(weight: QuantizedWeight) -> tuple[BlockScaled, BlockScaled]:
    """The bytes and their transpose."""
    assert weight.w_t is not None
    return weight.w, weight.w_t


def ours(p: Problem, granularity: WgradGranularity, cached: QuantizedWeight | None = None) -> Linear:
    """This project's linear over the problem's weight; without `cached` it quantises the weight in every forward."""
    precision = GemmPrecision(wgrad_granularity=granularity)
    return lambda x: fp8_linear(x, p.weight, cached or quantized(p.weight), precision, Backend.deepgemm)


def variants(p: Problem) -> Iterator[tuple[str, bool, Linear]]:
    """(name, whether main_grad is set, forward) of everything that is timed."""
    cached = quantized(p.weight)
    for frame, main_grad in (("grad", False), ("main_grad", True)):
        yield f"bf16 {frame}", main_grad, (lambda x: bf16_linear(x, p.weight))
        for granularity in WgradGranularity:
            yield f"ours {granularity.value} {frame}", main_grad, ours(p, granularity)
            yield f"ours {granularity.value} {frame} cached", main_grad, ours(p, granularity, cached)
    yield "torch bf16 grad", False, (lambda x: torch.nn.functional.linear(x, p.weight))
    for name, make in (("torchao grad", torchao_linear), ("te grad", transformer_engine_linear)):
        forward = make(p.weight)
        if forward is not None:
            yield name, False, forward


def gemms_alone(p: Problem, granularity: WgradGranularity) -> Timing:
    """DeepGEMM's three GEMMs on operands that are quantised beforehand: the bound of every FP8 variant."""
    kernels, precision = kernels_of(Backend.deepgemm), GemmPrecision(wgrad_granularity=granularity)
    x, x_t = kernels.quantize_dual(p.x, dtype=E4M3, scale_format=ScaleFormat.fp32, t_block=precision.x_t_block)
    dy, dy_t = kernels.quantize_dual(p.dy, dtype=E4M3, scale_format=ScaleFormat.fp32)
    w, w_t = both(quantized(p.weight))
    out = torch.zeros(p.weight.shape, dtype=torch.float32, device="cuda")

    def run() -> None:
        kernels.fprop(x, w)
        kernels.dgrad(dy, w_t)
        kernels.wgrad(dy_t, x_t, out)

    return measure(run)


def checks(p: Problem, rows: int = 512) -> dict[str, float]:
    """calc_diff of the three GEMMs from the float reference on the dequantised operands: `rows` rows of each output."""
    kernels = kernels_of(Backend.deepgemm)
    x, x_t = kernels.quantize_dual(p.x, dtype=E4M3, scale_format=ScaleFormat.fp32)
    dy, dy_t = kernels.quantize_dual(p.dy, dtype=E4M3, scale_format=ScaleFormat.fp32)
    w, w_t = both(quantized(p.weight))

    def against(got: torch.Tensor, a: torch.Tensor, b_t: torch.Tensor) -> float:
        return calc_diff(got[:rows], a[:rows].double() @ b_t.double().t())

    blocks = kernels.quantize_dual(p.x, dtype=E4M3, scale_format=ScaleFormat.fp32, t_block=WEIGHT_BLOCK)[1]
    return {
        "fprop": against(kernels.fprop(x, w), x.dequantize(), w.dequantize()),
        "dgrad": against(kernels.dgrad(dy, w_t), dy.dequantize(), w_t.dequantize()),
        "wgrad groups": against(kernels.wgrad(dy_t, x_t), dy_t.dequantize(), x_t.dequantize()),
        "wgrad blocks": against(kernels.wgrad(dy_t, blocks), dy_t.dequantize(), blocks.dequantize()),
    }


def gradient_errors(p: Problem) -> dict[str, float]:
    """Relative error of dW (Frobenius, first 512 rows) against float64 on the BF16 operands, for both granularities."""
    exact = p.dy[:, :512].double().t() @ p.x.detach().double()
    errors = {}
    for granularity in WgradGranularity:
        main_grad = p.add_main_grad()
        p.step(ours(p, granularity))
        errors[granularity.value] = float((main_grad[:512].double() - exact).norm() / exact.norm())
        p.drop_main_grad()
    return errors


def saved_bytes(p: Problem, forward: Linear) -> int:
    """Bytes that a forward keeps alive for its backward: what it allocated beside its output, and X itself where the graph holds it."""
    forward(p.x)  # a rival that keeps something of its last iteration lets go of it here
    before = torch.cuda.memory_allocated()
    y = forward(p.x)
    allocated = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    # torch's own linear has no `saved_tensors`; it keeps X. Transformer Engine keeps None in some places.
    saved = getattr(y.grad_fn, "saved_tensors", (p.x,))
    holds_x = any(t is not None and t.data_ptr() == p.x.data_ptr() for t in saved)
    return allocated + holds_x * p.x.numel() * p.x.element_size()


def time_linear(p: Problem, base: dict[str, object], repeats: int, fast: bool) -> list[dict[str, object]]:
    """The records of one linear layer: checks first, then every variant, then the bounds."""
    records: list[dict[str, object]] = []
    if not fast:
        records.append({**base, "kind": "check", **checks(p), "dW error": gradient_errors(p)})
    for variant, main_grad, forward in variants(p):
        if main_grad:
            p.add_main_grad()
        timing = measure(functools.partial(p.step, forward), repeats)
        p.x.grad = p.weight.grad = None
        kept = saved_bytes(p, forward)
        if main_grad:
            p.drop_main_grad()
        records.append({**base, "kind": "time", "variant": variant, **vars(timing), "saved_bytes": kept})
    for granularity in WgradGranularity:
        timing = gemms_alone(p, granularity)
        records.append({**base, "kind": "time", "variant": f"gemms alone {granularity.value}", **vars(timing)})
    return records


def time_layer(model: str, args: argparse.Namespace) -> tuple[list[dict[str, object]], bool]:
    """All records of one model and whether every check passed; each linear's are written when it is done."""
    records: list[dict[str, object]] = []
    for name, (n, k) in MODELS[model].linears().items():
        base = {"model": model, "linear": name, "T": args.toks, "N": n, "K": k}
        found = time_linear(Problem.make(args.toks, n, k), base, args.repeats, args.fast)
        write_json(args.json, [{"bench": "linear", **machine(), **r} for r in found])
        print(f"{model} {name} is done", file=sys.stderr, flush=True)
        records += found
        torch.cuda.empty_cache()
    passed = all(r[gemm] < LIMIT for r in records if r["kind"] == "check" for gemm in GEMMS)  # type: ignore[operator]
    return records, passed


def summarize(model: str, records: list[dict[str, object]]) -> list[dict[str, object]]:
    """One row a variant: milliseconds of each linear, their sum, and the speed-up over BF16 in the same frame."""
    times: dict[str, dict[str, float]] = {}
    for r in records:
        if r["kind"] == "time":
            times.setdefault(str(r["variant"]), {})[str(r["linear"])] = float(r["median_ms"])  # type: ignore[arg-type]
    total = {variant: sum(by.values()) for variant, by in times.items()}
    rows: list[dict[str, object]] = []
    for variant, by in times.items():
        base = "bf16 main_grad" if "main_grad" in variant or "alone" in variant else "torch bf16 grad"
        rows.append({"model": model, "variant": variant, **by, "layer": total[variant], "x bf16": total[base] / total[variant]})
    return rows


def main(argv: list[str]) -> int:
    """Run the command; argv as in `--help`. Returns 0, or 1 where a check fails."""
    parser = argparse.ArgumentParser(prog="jetrl bench linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--toks", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--fast", action="store_true", help="skip the checks")
    parser.add_argument("--json", default="", metavar="FILE", help="append one object a line")
    args = parser.parse_args(argv)
    require_cuda("bench linear")
    write_json(args.json, [])
    torch.manual_seed(0)
    print(machine())
    passed = True
    for model in args.model or MODELS:
        records, ok = time_layer(model, args)
        passed &= ok
        for r in records:
            if r["kind"] == "check":
                print({key: value for key, value in r.items() if key != "kind"})
        columns = ("variant", *MODELS[model].linears(), "layer", "x bf16")
        print_table(f"{model}, {args.toks} tokens, forward + backward, ms", columns, summarize(model, records))
    return 0 if passed else 1
