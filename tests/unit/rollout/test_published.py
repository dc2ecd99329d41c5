"""Fingerprints tell any two different tensors apart; what an engine must hold is compared rectangle by rectangle, by name."""

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.shards import hf_tensors
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.rollout.fingerprint import fingerprint, unsigned_zero
from jetrl_megatron.rollout.published import Expected, Fingerprints, differences, engine_pieces
from tests.tiny_models import tiny_config

ARCH = ModelArchitecture.from_hf_config(tiny_config("qwen3", num_hidden_layers=1).to_dict())


@pytest.mark.parametrize("algorithm", ["sha256", "mix"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_fingerprints_see_every_change(algorithm, dtype):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(37, 53, generator=generator).to(dtype)
    raw = base.view(torch.uint8)
    changed = []
    for row, column in ((0, 0), (36, raw.shape[1] - 1), (17, 20)):
        other = raw.clone()
        other[row, column] ^= 1
        changed.append(other)
    changed += [raw.flip(0), raw[:, [1, 0, *range(2, raw.shape[1])]], raw[:36], raw.reshape(-1).roll(8)]
    prints = [fingerprint(t, algorithm) for t in (raw, *changed)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(base, algorithm) == prints[0] == fingerprint(base.t().contiguous().t(), algorithm)


def test_mix_does_not_depend_on_alignment_or_chunking(monkeypatch):
    data = torch.arange(4099, dtype=torch.int64).to(torch.uint8)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    whole = fingerprint(data, "mix")
    assert fingerprint(shifted, "mix") == whole
    monkeypatch.setattr("jetrl_megatron.rollout.fingerprint._CHUNK_WORDS", 100)
    assert fingerprint(data, "mix") == whole
    with pytest.raises(ValueError, match="md5"):
        fingerprint(data, "md5")


def test_unsigned_zero_changes_negative_zeros_alone():
    x = torch.tensor([-0.0, 0.0, -1.0, 2.0], dtype=torch.bfloat16)
    assert (
        unsigned_zero(x).view(torch.int16).tolist() == torch.tensor([0.0, 0.0, -1.0, 2.0], dtype=torch.bfloat16).view(torch.int16).tolist()
    )


def expected(tp, fp8, change=None, negative_zero="", algorithm="sha256"):
    prints = Fingerprints(ARCH, tp, fp8, algorithm)
    for number, target in enumerate(hf_tensors(ARCH, fp8)):
        generator = torch.Generator().manual_seed(number)
        data = torch.randn(target.shape, generator=generator).to(torch.float8_e4m3fn if target.fp8 else torch.bfloat16)
        if target.name == negative_zero:
            data.view(-1)[0] = -0.0
        if target.name == change:
            data.view(torch.uint8).view(-1)[3] ^= 1
        prints.add(target.name, data)
        if target.fp8:
            prints.add(target.scale_name, torch.rand(target.scale_shape, generator=generator))
    by_rank, unsigned = prints.take()
    return Expected(version=WeightVersion(1, ""), by_rank=tuple(by_rank), unsigned=unsigned)


def test_every_rank_must_hold_its_rectangles_and_a_difference_is_named():
    fp8 = fp8_modules(ARCH)
    right, wrong = expected(2, fp8), expected(2, fp8, change="model.layers.0.self_attn.o_proj.weight")
    for rank in range(2):
        assert differences(right, rank, right.by_rank[rank]) == []
    # o_proj is cut along K: byte 3 lies in the columns of rank 0.
    assert differences(right, 0, wrong.by_rank[0]) == ["model.layers.0.self_attn.o_proj.weight[0:256,0:256] differs"]
    assert differences(right, 1, wrong.by_rank[1]) == []
    assert "model.layers.0.self_attn.o_proj.weight_scale_inv[0:2,2:4]" in right.by_rank[1]


def test_missing_and_unknown_tensors_are_named():
    right = expected(1, fp8_modules(ARCH))
    held = dict(right.by_rank[0])
    taken = held.pop("model.norm.weight[0:256,0:1]")
    held["model.norm.wieght[0:256,0:1]"] = taken
    assert differences(right, 0, held) == [
        "model.norm.weight[0:256,0:1] is missing in the engine",
        "model.norm.wieght[0:256,0:1] is unknown to the actor",
    ]


def test_an_engine_that_serves_bf16_where_fp8_was_published_differs():
    fp8, bf16 = expected(1, fp8_modules(ARCH)), expected(1, frozenset())
    lines = differences(fp8, 0, bf16.by_rank[0])
    assert len([line for line in lines if "weight_scale_inv" in line and "missing" in line]) == 7


def test_negative_zeros_are_forgiven_only_where_the_engine_could_not_see_them():
    name = "model.layers.0.self_attn.o_proj.weight"
    key = f"{name}[0:256,0:512]"
    right = expected(1, frozenset(), negative_zero=name)
    assert list(right.unsigned) == [key]
    held = {**right.by_rank[0], key: right.unsigned[key]}
    assert differences(right, 0, held, unsigned_zeros=[key]) == []
    assert differences(right, 0, held) == [f"{key} differs"]
    assert expected(1, frozenset(), negative_zero=name, algorithm="mix").unsigned == {}, "an engine on a GPU sees them"


def test_an_engine_layout_that_cuts_blocks_is_refused():
    with pytest.raises(ValueError, match="tp=4"):
        engine_pieces(ARCH, 4, fp8_modules(ARCH))
