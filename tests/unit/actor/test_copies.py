"""What a layer copies on the GPU's path, forward and backward, traced on a CPU: every kernel is replaced by one that only allocates."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from jetrl_megatron.actor import flash, flash_backward, norm, rope, triton_rope
from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.actor.flash_backward import Operands
from jetrl_megatron.actor.packed import packed_context
from jetrl_megatron.config import AttentionBackward, AttentionKernel, PrecisionConfig
from jetrl_megatron.fp8 import deepgemm
from tests.unit.actor.single_rank import single_rank_actor

TOKS, HIDDEN, DIM, KV_HEADS, QUERIES = 256, 256, 128, 2, 2
COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::cat", "aten::slice_backward")


class Watch(TorchDispatchMode):
    """Collects (operator, shape) of everything copied that is as large as k or larger."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._schema.name
        if name in COPIES and out.numel() >= TOKS * KV_HEADS * DIM:
            self.found.append((name.removeprefix("aten::"), tuple(out.shape)))
        return out


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("stand-ins for the kernels' launches are for Triton's interpreter")

    def flash3(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def cudnn(x: Operands, scale: float) -> tuple[Tensor, ...]:
        return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)

    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *args, **options: None)
    monkeypatch.setattr(norm, "rms_norm", norm._TritonNorm.apply)
    monkeypatch.setattr(norm, "rms_norm_quantized", norm._triton_quantized)
    monkeypatch.setattr(rope, "_rotated", triton_rope.rotate)
    monkeypatch.setattr(flash, "_flash3_forward", lambda: flash3)
    monkeypatch.setattr(flash_backward, "cudnn_backward", cudnn)
    monkeypatch.setattr(flash_backward.segment_backward, "__defaults__", (TOKS // 2,))
    monkeypatch.setattr(deepgemm, "load_deep_gemm", lambda: SimpleNamespace(fp8_gemm_nt=lambda a, b, out, **options: None))
    kernels = deepgemm.DeepGemmKernels()
    for module in ("linear", "quantized_input"):
        monkeypatch.setattr(f"jetrl_megatron.fp8.{module}.kernels_of", lambda backend: kernels)


def copies(model, real: int) -> tuple[list, list]:
    """What forward and backward of one layer copy, of TOKS positions with one sequence of `real` tokens."""
    with single_rank_actor(model, PrecisionConfig()) as actor, megatron_scope(actor.device):
        layer = actor.chunks[0].decoder.layers[0]
        core = layer.self_attention.core_attention
        core.kernel, core.backward_kernel = AttentionKernel.flash3, AttentionBackward.cudnn
        context, _ = packed_context([real], TOKS, actor.device)
        x, dy = torch.randn(2, TOKS, 1, HIDDEN).bfloat16().unbind()
        x.requires_grad_()
        with Watch() as forward:
            y = layer(hidden_states=x, attention_mask=None, packed_seq_params=context)[0]
        with Watch() as backward:
            y.backward(dy)
    assert x.grad.shape == x.shape
    return forward.found, backward.found


V = ("clone", (TOKS, KV_HEADS, DIM))
"""The flash kernels' backwards are planned by v's layout; only a contiguous one has been compared on a GPU."""
D_QKV = ("cat", (TOKS, 1, KV_HEADS, (QUERIES + 2) * DIM))


def test_a_layer_copies_v_and_puts_the_gradients_of_q_k_and_v_together(one_layer_dir, gpu_path):
    assert copies(one_layer_dir, TOKS) == ([V], [D_QKV])


def test_padding_costs_the_forward_no_copy(one_layer_dir, gpu_path):
    forward, backward = copies(one_layer_dir, TOKS - 50)
    assert forward == [V]
    # do, q and out are put into their bucket (k and v too, which are smaller here), dq, dk and dv get their zeros.
    heads = KV_HEADS * QUERIES
    padded = [("cat", (TOKS, n, DIM)) for n in (heads, KV_HEADS, KV_HEADS)]
    assert backward == [("copy_", (TOKS - 50, heads, DIM))] * 3 + padded + [D_QKV]
