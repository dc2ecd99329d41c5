"""q, k, v and all gradients in front of attention: the bits of Megatron's own splitting, whatever norm runs."""

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention

from jetrl_megatron.actor import norm
from jetrl_megatron.actor.self_attention import FlowSelfAttention
from jetrl_megatron.config import PrecisionConfig
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import single_rank_actor

TOKS = 24


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("family", "kernel"), [("qwen3", False), ("qwen3", True), ("qwen2", False), ("llama", False)])
def test_values_and_gradients_are_those_of_megatrons_splitting(tmp_path, monkeypatch, family, kernel):
    if kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr(norm, "rms_norm", norm._TritonNorm.apply)
    model = write_tiny_model(tmp_path / "hf", family, num_hidden_layers=1)
    with single_rank_actor(model, PrecisionConfig()) as actor:
        attention, found = actor.chunks[0].decoder.layers[0].self_attention, []
        assert type(attention) is FlowSelfAttention
        arch = actor.arch
        for way in (SelfAttention, FlowSelfAttention):
            x = random(1, TOKS, 1, arch.hidden_size).to(actor.device).requires_grad_()
            for p in attention.parameters():
                p.main_grad.zero_()
            qkv = way.get_query_key_value_tensors(attention, x)
            assert [t.shape for t in qkv] == [(TOKS, 1, n, arch.head_dim) for n in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
            torch.autograd.backward(qkv, [random(2 + i, *t.shape).to(actor.device) for i, t in enumerate(qkv)])
            parameters = [p for module in (attention.linear_qkv, attention.q_layernorm, attention.k_layernorm) for p in module.parameters()]
            found.append([*qkv, x.grad, *(p.main_grad.clone() for p in parameters)])
        assert len(found[0]) == 4 + {"qwen3": 3, "qwen2": 2, "llama": 1}[family]
        assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*found, strict=True))
