"""DeepGEMM's kernels of a server's FP8 linears, compiled before they are timed: several processes, one for each linear.

Enters: a model's shape, the servers' TP degree, which linears are FP8. Leaves: kernels in the cache that actor and servers share
(DG_JIT_CACHE_DIR, by default ~/.deep_gemm). DeepGEMM picks a kernel by the number of rows and compiles it at its first use, for seconds and
one after the other, in the rollout that first has so many rows; with CUDA's compiler that is minutes of a cold bench. What is in the cache
already takes no time.
Left out: the backward's kernels, which an update compiles in its first step.

    python -m jetrl_megatron.bench.precompile N K      # one linear, [N, K]
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from conversion.architecture import ModelArchitecture
from conversion.shards import vllm_tensors
from jetrl_megatron.failure import RunFailure

ROWS = (1, 16, 32, 64, 96, *range(128, 8193, 128))
"""Numbers of rows that are run: those of CUDA graphs, and of prefills up to what vLLM computes at a time. Most share a kernel."""


def server_linears(arch: ModelArchitecture, tp: int, fp8: frozenset[str]) -> list[tuple[int, int]]:
    """Return (N, K) of the FP8 linears of one engine rank, each shape once; arguments and errors are those of `vllm_tensors`."""
    return list(dict.fromkeys(stored.rows_cols for stored in vllm_tensors(arch, tp, fp8) if stored.fp8))


def precompile(linears: Sequence[tuple[int, int]]) -> float:
    """Compile the kernels of all of them at the same time; returns the seconds it took.

    Raises RunFailure with the end of the first failing process's output.
    """
    start_s = time.perf_counter()
    with ThreadPoolExecutor(max_workers=len(linears)) as threads:
        for (n, k), done in zip(linears, threads.map(_run, linears), strict=True):
            if done.returncode:
                raise RunFailure(f"compiling the kernels of a linear [{n}, {k}] left with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - start_s


def _run(linear: tuple[int, int]) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "jetrl_megatron.bench.precompile", *map(str, linear)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def compile_linear(n: int, k: int) -> None:
    """Run the forward GEMM of a linear [n, k] at every number of rows on this process's GPU."""
    import torch

    from jetrl_megatron.config import Backend, ScaleFormat
    from jetrl_megatron.fp8 import resolve_backend
    from jetrl_megatron.fp8.backend import kernels_of
    from jetrl_megatron.fp8.quantize import ROW_BLOCK

    kernels, fp32 = kernels_of(resolve_backend(Backend.auto, "cuda")), ScaleFormat.fp32
    w, _ = kernels.quantize_weight(torch.randn(n, k, device="cuda").bfloat16(), scale_format=fp32, with_transpose=False)
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        kernels.fprop(kernels.quantize(x, ROW_BLOCK, dtype=torch.float8_e4m3fn, scale_format=fp32), w)
    torch.cuda.synchronize()


if __name__ == "__main__":
    compile_linear(int(sys.argv[1]), int(sys.argv[2]))
