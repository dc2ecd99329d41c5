"""The actor's operators inside vLLM's own dispatch, in a process of their own: norms bit for bit, and on a CPU the block FP8 linear."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from jetrl_megatron.rollout.compat import engine_environment

CODE = """
import torch
from jetrl_megatron.rollout.vllm_plugin import register, registered
register()
register()
assert not registered(), "nobody has asked for the operators yet"
from vllm import ir
from jetrl_megatron.actor.norm import rms_norm
device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(1)
x, residual = (torch.randn(300, 256, generator=generator).bfloat16().to(device) for _ in range(2))
weight = torch.exp(torch.randn(256, generator=generator)).bfloat16().to(device)
with torch.no_grad():
    for name in ("rms_norm", "fused_add_rms_norm"):
        getattr(ir.ops, name).set_default(["jetrl"])
        assert getattr(ir.ops, name).get_priority() == ["jetrl"]
    assert registered()
    assert not torch.cuda.is_available() or hasattr(torch.ops.jetrl, "rms_norm")
    assert torch.equal(ir.ops.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    y, total = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(y, rms_norm(x + residual, weight, 1e-5))
    native = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-5)
    assert not torch.equal(native, rms_norm(x, weight, 1e-5)), "the check above can fail"
for bad in ((x, None, 1e-5), (x, weight, 1e-5, 128), (x.float(), weight, 1e-5)):
    try:
        ir.ops.rms_norm(*bad)
    except ValueError as error:
        assert "BF16 rows and a weight" in str(error)
    else:
        raise AssertionError("taken")
if device == "cpu":
    from types import SimpleNamespace
    from jetrl_megatron.config import Backend
    from jetrl_megatron.fp8 import GemmPrecision, WeightCache, fp8_linear
    from jetrl_megatron.rollout.compat import cpu_block_kernels
    kernel = object.__new__(cpu_block_kernels()[0])
    w = torch.randn(384, 256, generator=generator).bfloat16()
    bias = torch.randn(384, generator=generator).bfloat16()
    cache = WeightCache()
    cache.register("w", w)
    cache.refresh()
    held = cache.get("w")
    layer = SimpleNamespace(weight=held.w.data, weight_scale_inv=held.w.scale)
    with torch.no_grad():
        wanted = fp8_linear(x, w, held, GemmPrecision(), Backend.reference)
    assert torch.equal(kernel.apply_weights(layer, x), wanted)
    assert torch.equal(kernel.apply_weights(layer, x.view(3, 100, 256), bias), (wanted + bias).view(3, 100, 384))
print("equal")
"""


def test_vllms_dispatch_gives_the_actors_bits():
    environment = {**os.environ, **engine_environment(torch.cuda.is_available(), False), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["equal"], done.stdout[-2000:] + done.stderr[-3000:]
