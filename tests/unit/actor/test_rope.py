"""Rope: frequencies of the three supported scalings equal those of transformers, others are refused by name; rotation by value."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor.rope import RopeTable, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}], ids=lambda s: s["rope_type"])
def test_scaled_frequencies_are_those_of_transformers(scaling):
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters={**scaling, "rope_theta": 500000.0})
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    got = inverse_frequencies(128, 500000.0, scaling)
    assert factor == 1.0 and torch.equal(got, want)
    plain = inverse_frequencies(128, 500000.0, None)
    assert not torch.equal(got, plain) and torch.equal(plain, inverse_frequencies(128, 500000.0, {"rope_type": "default"}))
    assert plain[0] == 1.0 and plain[1] == pytest.approx(500000.0 ** (-2 / 128), rel=1e-6)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_scalings_are_refused_by_name(kind):
    scaling = {"rope_type": kind, "factor": 4.0}
    message = rf"rope scaling '{kind}' is not supported; supported: default, linear, llama3\. Remove rope_scaling from config.json"
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(128, 10000.0, scaling)
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(128, 10000.0, {"type": kind, "factor": 4.0})
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    with pytest.raises(ValueError, match=kind):
        ModelArchitecture.from_hf_config({**config, "vocab_size": 8, "rope_scaling": scaling})


def test_rotation_turns_each_pair_by_position_times_frequency():
    inv = inverse_frequencies(8, 100.0, None)
    table = RopeTable(inv, torch.device("cpu"), torch.bfloat16)
    positions = torch.tensor([0, 3, 300])
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = table.rotate(x, positions, 301)
    assert torch.equal(got[0], x[0])
    angle = (positions[:, None].float() * inv).double()
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert (got.double() - want).abs().max() < 4 * 2**-8


def test_a_table_that_grew_gives_the_same_rotation():
    inv = inverse_frequencies(8, 100.0, None)
    small, grown = (RopeTable(inv, torch.device("cpu"), torch.bfloat16) for _ in range(2))
    x, positions = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.tensor([0, 1, 7, 100, 255])
    grown.rotate(x, positions, 5000)
    assert torch.equal(small.rotate(x, positions, 256), grown.rotate(x, positions, 256))


def test_rotation_rounds_once_and_its_gradient_rotates_back():
    """Products of BF16 values are exact in FP32, so one rounding of the sum is what any engine that rounds once gives."""
    table = RopeTable(inverse_frequencies(64, 10000.0, None), torch.device("cpu"), torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(50, 3, 64, generator=g).bfloat16() for _ in range(2))
    positions = torch.randint(0, 900, (50,), generator=g)
    x.requires_grad_()
    got = table.rotate(x, positions, 900)
    got.backward(dy)
    cos, sin = (t[positions][:, None, :].double() for t in table._table(900))

    def rotated(v, sin):
        first, second = v.detach().double().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float().bfloat16()

    assert torch.equal(got, rotated(x, sin)) and torch.equal(x.grad, rotated(dy, -sin))


@pytest.mark.parametrize("heads", [1, 3])
def test_the_gpu_kernel_gives_the_same_bytes(heads):
    pytest.importorskip("triton")
    from jetrl_megatron.actor.rope import _rotated
    from jetrl_megatron.actor.triton_rope import rotate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = RopeTable(inverse_frequencies(96, 10000.0, None), torch.device("cpu"), torch.bfloat16)
    g = torch.Generator().manual_seed(4)
    fused = torch.randn(7, heads + 2, 96, generator=g).bfloat16()
    x = fused[:, 1 : heads + 1]  # a view, as q inside the fused projection
    positions = torch.tensor([0, 5, 5, 300, 1, 77, 255])
    for inverse in (False, True):
        moved = [t.to(device) for t in (fused, *table._table(301), positions)]
        got = rotate(moved[0][:, 1 : heads + 1], *moved[1:], inverse=inverse)
        assert torch.equal(got.cpu(), _rotated(x, *table._table(301), positions, inverse=inverse))


def test_no_tokens_launch_nothing(monkeypatch):
    pytest.importorskip("triton")
    from jetrl_megatron.actor import triton_rope

    monkeypatch.setattr(triton_rope, "_rope_kernel", {})  # whatever is launched on is no key
    x, table, none = torch.empty(0, 2, 64).bfloat16(), torch.ones(4, 32).bfloat16(), torch.empty(0, dtype=torch.int64)
    assert triton_rope.rotate(x, table, table, none, inverse=False).shape == (0, 2, 64)
    with pytest.raises(KeyError):
        triton_rope.rotate(torch.ones(1, 2, 64).bfloat16(), table, table, none.new_zeros(1), inverse=False)
