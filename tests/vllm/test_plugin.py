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


TRANSFER = """
import torch
from types import SimpleNamespace
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from jetrl_megatron.rollout import vllm_transfer
from jetrl_megatron.rollout.vllm_plugin import IN_PLACE, register
from jetrl_megatron.rollout.published import engine_pieces
from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from tests.unit.rollout.test_vllm_in_place import Engine, random_tensors
from tests.tiny_models import tiny_config
register()
register()
config = tiny_config("qwen3", num_hidden_layers=1).to_dict()
arch = ModelArchitecture.from_hf_config(config)
fp8 = fp8_modules(arch)
tensors, (_, pieces) = random_tensors(arch, fp8), engine_pieces(arch, 2, fp8)
model = Engine(pieces)
settings = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2), model_config=None)
engine = WeightTransferEngineFactory.create_engine(SimpleNamespace(backend=IN_PLACE), settings, torch.device("cpu"), model)
assert type(engine) is vllm_transfer.InPlaceNcclEngine
vllm_transfer.worker_tp_rank = lambda: 1
seen = {}
def receive(iterator, group, src, post_unpack_func, buffer_size_bytes, num_buffers, device):
    seen.update(group=group, src=src, size=buffer_size_bytes, calls=0)
    described = list(iterator)
    for batch in (described[i : i + 5] for i in range(0, len(described), 5)):
        for name, (shape, dtype) in batch:
            assert tensors[name].dtype is dtype and list(tensors[name].shape) == shape
        seen["calls"] += 1
        post_unpack_func([(name, tensors[name]) for name, _ in batch])
nccl_engine.packed_nccl_broadcast_consumer = receive
update = {"names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()]}
update["dtype_names"] = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
update |= {"packed": True, "packed_buffer_size_bytes": 1234, "config": config}
torch.accelerator.synchronize = lambda: None
try:
    engine.update_weights(update)
except RuntimeError as error:
    assert "/init_weight_transfer_engine comes first" in str(error)
else:
    raise AssertionError("taken")
engine.model_update_group = "the group"
engine.start_weight_update()
engine.update_weights(update)
engine.finish_weight_update()
batches = -(-len(tensors) // 5)
assert seen == {"group": "the group", "src": 0, "size": 1234, "calls": batches}, seen
assert torch.equal(model.get_parameter("model.norm.weight"), tensors["model.norm.weight"])
for suffix in ("", "_scale_inv"):
    q = tensors["model.layers.0.self_attn.q_proj.weight" + suffix]
    half = q[len(q) // 2 :].float()
    assert torch.equal(model.get_parameter("model.layers.0.self_attn.qkv_proj.weight" + suffix)[: len(half)].float(), half)
deeper = tiny_config("qwen3", num_hidden_layers=2).to_dict()
for bad, says in (({**update, "config": deeper}, "has no model.layers.1."), ({**update, "packed": False}, "packed")):
    try:
        engine.update_weights(bad)
    except Exception as error:
        assert says in str(error), error
    else:
        raise AssertionError("taken")
assert seen["calls"] == batches, "the sender's bytes are taken to their end though nothing could be written"
print("written")
"""


def test_vllm_finds_the_engine_that_writes_in_place_and_calls_it_as_its_own():
    environment = {**os.environ, **engine_environment(torch.cuda.is_available(), False), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRANSFER], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["written"], done.stdout[-2000:] + done.stderr[-3000:]
