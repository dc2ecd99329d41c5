"""Row orders written out by hand: fused QKV by kv head, its bias, gate above up on each rank, explicit head_dim."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conversion.actor_io import load_hf_into_rank, rank_tensor_shapes
from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout
from conversion.names import hf_shapes
from tests.unit.conversion.directories import write_config

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 8,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
ATTN = "model.layers.0.self_attn."


@pytest.fixture
def labelled(tmp_path):
    """A Qwen2-like directory: row r of q, k, v is filled with bit pattern r, 1000 + r, 2000 + r; gate rows 3000 + r, up 4000 + r."""
    arch = ModelArchitecture.from_hf_config(CONFIG)
    starts = {"q_proj": 0, "k_proj": 1000, "v_proj": 2000, "gate_proj": 3000, "up_proj": 4000, "o_proj": 5000, "down_proj": 6000}
    tensors = {}
    for name, shape in hf_shapes(arch).items():
        rows = np.arange(shape[0], dtype=np.int16) + starts.get(name.split(".")[-2], 7000)
        data = np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape).copy()
        tensors[name] = torch.from_numpy(data).view(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path, CONFIG)
    return tmp_path, arch


def labels(tensor: torch.Tensor) -> list[int]:
    rows = tensor.view(torch.int16)
    return (rows if rows.dim() == 1 else rows[:, 0]).tolist()


def group(kv_head: int) -> list[int]:
    q = [r for head in (2 * kv_head, 2 * kv_head + 1) for r in range(32 * head, 32 * (head + 1))]
    kv = list(range(32 * kv_head, 32 * (kv_head + 1)))
    return q + [1000 + r for r in kv] + [2000 + r for r in kv]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_qkv_is_grouped_by_kv_head(labelled, kind):
    path, arch = labelled
    name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    whole = load_hf_into_rank(path, arch, ParallelLayout(), pp_rank=0, tp_rank=0)[name]
    assert labels(whole) == group(0) + group(1)
    for rank in (0, 1):
        part = load_hf_into_rank(path, arch, ParallelLayout(tp=2), pp_rank=0, tp_rank=rank)[name]
        assert labels(part) == group(rank)


def test_fc1_holds_its_gate_rows_above_its_up_rows(labelled):
    path, arch = labelled
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert labels(load_hf_into_rank(path, arch, ParallelLayout(), pp_rank=0, tp_rank=0)[name]) == [*range(3000, 3008), *range(4000, 4008)]
    second = load_hf_into_rank(path, arch, ParallelLayout(tp=2), pp_rank=0, tp_rank=1)[name]
    assert labels(second) == [*range(3004, 3008), *range(4004, 4008)]


def test_row_parallel_layers_are_cut_by_rows_or_by_columns(labelled):
    path, arch = labelled
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    complete = load_hf_into_rank(path, arch, ParallelLayout(tp=2), pp_rank=0, tp_rank=1)[name]
    split = load_hf_into_rank(path, arch, ParallelLayout(tp=2, row_parallel="k_split"), pp_rank=0, tp_rank=1)[name]
    assert (tuple(complete.shape), labels(complete)) == ((32, 128), list(range(5032, 5064)))
    assert (tuple(split.shape), labels(split)) == ((64, 64), list(range(5000, 5064)))


def test_explicit_head_dim_gives_the_shapes(labelled):
    _, arch = labelled
    shapes = rank_tensor_shapes(arch, ParallelLayout(), 0, 0)
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == ((4 + 2 * 2) * 32, 64)
    assert shapes["decoder.layers.0.self_attention.linear_proj.weight"] == (64, 128)
