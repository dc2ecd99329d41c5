"""`bench linear`: forward and backward of a linear layer, all quantisation included, against BF16 and other libraries.

Enters: model names. Leaves: milliseconds for each of a decoder layer's four linears and their sum, the speed-up over BF16 in the same
autograd frame, and beside it the bound: DeepGEMM's three GEMMs alone. Exit 1 where a result is too far from float64.
Two frames: `grad` returns dW in BF16 as autograd's gradient; `main_grad` adds it into an FP32 buffer, as training does. In both, ours
quantises X, dY *and* W (with its transpose) in every iteration, although training quantises W once a step; `cached` leaves W out.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from jetrl_megatron.bench.rivals import torchao_linear, transformer_engine_linear
from jetrl_megatron.bench.shapes import MODELS
from jetrl_megatron.bench.timing import Timing, calc_diff, machine, measure, print_table, require_cuda, write_json
from jetrl_megatron.config import Backend, ScaleFormat
from jetrl_megatron.fp8 import GemmPrecision, QuantizedWeight, bf16_linear, fp8_linear
from jetrl_megatron.fp8.backend import kernels_of
from jetrl_megatron.fp8.precision import WgradGranularity

GEMMS = ("fprop", "dgrad", "wgrad groups", "wgrad blocks")
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

    def step(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """One forward and backward; gradients of the last iteration are dropped first."""
        self.x.grad = self.weight.grad = None
        forward(self.x).backward(self.dy)


def quantized(weight: torch.Tensor) -> QuantizedWeight:
    """The weight's bytes and their transpose, by the GPU quantiser."""
    pair = kernels_of(Backend.deepgemm).quantize_weight(weight.detach(), scale_format=ScaleFormat.fp32, with_transpose=True)
    return QuantizedWeight(*pair)


def variants(p: Problem) -> Iterator[tuple[str, bool, Callable[[torch.Tensor], torch.Tensor]]]:
    """(name, whether main_grad is set, forward) of everything that is timed."""
    cached = quantized(p.weight)
    precisions = {g.value: GemmPrecision(wgrad_granularity=g) for g in WgradGranularity}
    for frame, main_grad in (("grad", False), ("main_grad", True)):
        yield f"bf16 {frame}", main_grad, (lambda x: bf16_linear(x, p.weight))
        for name, precision in precisions.items():
            yield (
                f"ours {name} {frame}",
                main_grad,
                lambda x, precision=precision: fp8_linear(x, p.weight, quantized(p.weight), precision, Backend.deepgemm),
            )
            yield (
                f"ours {name} {frame} cached",
                main_grad,
                lambda x, precision=precision: fp8_linear(x, p.weight, cached, precision, Backend.deepgemm),
            )
    yield "torch bf16 grad", False, (lambda x: torch.nn.functional.linear(x, p.weight))
    for name, make in (("torchao grad", torchao_linear), ("te grad", transformer_engine_linear)):
        forward = make(p.weight)
        if forward is not None:
            yield name, False, forward


def gemms_alone(p: Problem, granularity: WgradGranularity) -> Timing:
    """DeepGEMM's three GEMMs on operands that are quantised beforehand: the bound of every FP8 variant."""
    kernels, precision = kernels_of(Backend.deepgemm), GemmPrecision(wgrad_granularity=granularity)
    formats = {"dtype": torch.float8_e4m3fn, "scale_format": ScaleFormat.fp32}
    x, x_t = kernels.quantize_dual(p.x, t_block=precision.x_t_block, **formats)
    dy, dy_t = kernels.quantize_dual(p.dy, **formats)
    w = quantized(p.weight)
    out = torch.zeros(p.weight.shape, dtype=torch.float32, device="cuda")

    def run() -> None:
        kernels.fprop(x, w.w)
        kernels.dgrad(dy, w.w_t)
        kernels.wgrad(dy_t, x_t, out)

    return measure(run)


def checks(p: Problem, rows: int = 512) -> dict[str, float]:
    """calc_diff of the three GEMMs from the float reference on the dequantised operands: `rows` rows of each output."""
    kernels = kernels_of(Backend.deepgemm)
    formats = {"dtype": torch.float8_e4m3fn, "scale_format": ScaleFormat.fp32}
    (x, x_t), (dy, dy_t), w = kernels.quantize_dual(p.x, **formats), kernels.quantize_dual(p.dy, **formats), quantized(p.weight)

    def against(got: torch.Tensor, a: torch.Tensor, b_t: torch.Tensor) -> float:
        return calc_diff(got[:rows], a[:rows].double() @ b_t.double().t())

    blocks = kernels.quantize_dual(p.x, t_block=(128, 128), **formats)[1]
    return {
        "fprop": against(kernels.fprop(x, w.w), x.dequantize(), w.w.dequantize()),
        "dgrad": against(kernels.dgrad(dy, w.w_t), dy.dequantize(), w.w_t.dequantize()),
        "wgrad groups": against(kernels.wgrad(dy_t, x_t), dy_t.dequantize(), x_t.dequantize()),
        "wgrad blocks": against(kernels.wgrad(dy_t, blocks), dy_t.dequantize(), blocks.dequantize()),
    }


def gradient_errors(p: Problem) -> dict[str, float]:
    """Relative error of dW (Frobenius, first 512 rows) against float64 on the BF16 operands, for both granularities."""
    exact = p.dy[:, :512].double().t() @ p.x.detach().double()
    errors = {}
    for granularity in WgradGranularity:
        p.weight.main_grad = torch.zeros(p.weight.shape, dtype=torch.float32, device="cuda")
        p.step(lambda x, g=granularity: fp8_linear(x, p.weight, quantized(p.weight), GemmPrecision(wgrad_granularity=g), Backend.deepgemm))
        errors[granularity.value] = float((p.weight.main_grad[:512].double() - exact).norm() / exact.norm())
        del p.weight.main_grad
    return errors


def saved_bytes(p: Problem, forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Bytes that a forward keeps alive for its backward: what it allocated beside its output, and X itself where the graph holds it."""
    before = torch.cuda.memory_allocated()
    y = forward(p.x)
    allocated = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    # torch's own linear has no `saved_tensors`; it keeps X.
    saved = getattr(y.grad_fn, "saved_tensors", (p.x,))
    return allocated + any(t.data_ptr() == p.x.data_ptr() for t in saved) * p.x.numel() * p.x.element_size()


def time_linear(p: Problem, base: dict[str, object], repeats: int, fast: bool) -> list[dict[str, object]]:
    """The records of one linear layer: checks first, then every variant, then the bounds."""
    records: list[dict[str, object]] = []
    if not fast:
        records.append({**base, "kind": "check", **checks(p), "dW error": gradient_errors(p)})
    for variant, main_grad, forward in variants(p):
        if main_grad:
            p.weight.main_grad = torch.zeros(p.weight.shape, dtype=torch.float32, device="cuda")
        timing = measure(functools.partial(p.step, forward), repeats)
        p.x.grad = p.weight.grad = None
        kept = saved_bytes(p, forward)
        if main_grad:
            del p.weight.main_grad
        records.append({**base, "kind": "time", "variant": variant, **vars(timing), "saved_bytes": kept})
    for granularity in WgradGranularity:
        timing = gemms_alone(p, granularity)
        records.append({**base, "kind": "time", "variant": f"gemms alone {granularity.value}", **vars(timing)})
    return records


def time_layer(model: str, toks: int, repeats: int, fast: bool) -> tuple[list[dict[str, object]], bool]:
    """All records of one model and whether every check passed."""
    records: list[dict[str, object]] = []
    for name, (n, k) in MODELS[model].linears().items():
        records += time_linear(Problem.make(toks, n, k), {"model": model, "linear": name, "T": toks, "N": n, "K": k}, repeats, fast)
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
    rows = []
    for variant, by in times.items():
        base = "bf16 main_grad" if "main_grad" in variant or "alone" in variant else "torch bf16 grad"
        rows.append({"model": model, "variant": variant, **by, "layer": total[variant], "x bf16": total[base] / total[variant]})
    return rows


def main(argv: list[str]) -> int:
    """Run the command; argv as in `--help`. Returns 0, or 1 where a check fails."""
    parser = argparse.ArgumentParser(prog="bench linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--toks", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--fast", action="store_true", help="skip the checks")
    parser.add_argument("--json", default="", metavar="FILE", help="append one object a line")
    args = parser.parse_args(argv)
    require_cuda("bench linear")
    torch.manual_seed(0)
    print(machine())
    passed = True
    for model in args.model or MODELS:
        records, ok = time_layer(model, args.toks, args.repeats, args.fast)
        passed &= ok
        for r in records:
            if r["kind"] == "check":
                print({key: value for key, value in r.items() if key != "kind"})
        columns = ("variant", *MODELS[model].linears(), "layer", "x bf16")
        print_table(f"{model}, {args.toks} tokens, forward + backward, ms", columns, summarize(model, records))
        write_json(args.json, [{"bench": "linear", **machine(), **r} for r in records])
    return 0 if passed else 1
