"""On disk: HF -> Megatron -> HF for three families, any layout, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conversion import execute
from conversion.checkpoint import MANIFEST
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from tests.tiny_models import write_tiny_model
from tests.unit.conversion.directories import as_bytes, load, write_bf16, write_fp8
from tests.unit.conversion.shapes import published_config

LAYOUTS = [
    {"tp": tp, "row_parallel": row, **pipeline}
    for tp in (1, 2, 4)
    for row, pipeline in [("k_complete", {}), ("k_split", {"pp": 2}), ("k_complete", {"pp": 2, "vpp": 2})]
] + [{"tp": 2, "pp": 2, "first_stage_layers": 1}, {"tp": 1, "pp": 4}]


@pytest.fixture(scope="module", params=[("llama", True), ("qwen2", False), ("qwen3", True), ("llama", False)], ids=str)
def source(request, tmp_path_factory):
    """A random tiny model with a vocabulary of 1003 and the files that must travel."""
    family, tied = request.param
    small = {"vocab_size": 1003, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    path = write_tiny_model(tmp_path_factory.mktemp("hf") / "source", family, tie_word_embeddings=tied, **small)
    (path / "generation_config.json").write_text('{ "eos_token_id": [2, 11],\n "top_k": 20}')
    (path / "tokenizer.json").write_bytes(b'{"version": "1.0"} \xff\x00')
    (path / "chat_template.jinja").write_text("{{ messages }}\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("tool")
    return path


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda o: "-".join(f"{k}{v}" for k, v in o.items()))
def test_there_and_back_again_is_bit_exact(source, tmp_path, options):
    convert(source, tmp_path / "megatron", Target(kind="megatron", layout=ParallelLayout(**options)))
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf"))
    assert as_bytes(tmp_path / "hf") == as_bytes(source)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes(), name
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == sorted([*(p.name for p in source.iterdir()), MANIFEST])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("row_parallel", ["k_complete", "k_split"])
def test_tensors_are_moved_in_windows_of_bounded_memory(tmp_path, monkeypatch, fp8, row_parallel):
    config = {**published_config("Llama-3.2-1B", layers=2, vocab=1003), "hidden_size": 256, "num_attention_heads": 8}
    config |= {"num_key_value_heads": 4, "intermediate_size": 384}
    source = (write_fp8 if fp8 else write_bf16)(tmp_path / "source", config)
    sizes = []
    real = execute._Scratch.take

    def take(self, num_bytes):
        sizes.append(num_bytes)
        return real(self, num_bytes)

    monkeypatch.setattr(execute._Scratch, "take", take)
    # No divisor of a head, a block or a shard: windows begin and end inside all of them.
    monkeypatch.setattr(execute, "WINDOW_BYTES", 7 * 512 + 100)
    layout = ParallelLayout(tp=1 if fp8 else 4, pp=2, row_parallel=row_parallel)
    convert(source, tmp_path / "megatron", Target(kind="megatron", layout=layout))
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf"))
    assert as_bytes(tmp_path / "hf") == as_bytes(source)
    assert max(sizes) <= 7 * 512 + 100 and len(sizes) > 1000


def test_resharding_between_layouts_equals_converting_directly(source, tmp_path):
    first, second = ParallelLayout(tp=4, pp=2), ParallelLayout(tp=2, pp=2, vpp=2, row_parallel="k_split", vocab_divisible_by=16)
    convert(source, tmp_path / "a", Target(kind="megatron", layout=first))
    convert(tmp_path / "a", tmp_path / "b", Target(kind="megatron", layout=second))
    convert(source, tmp_path / "c", Target(kind="megatron", layout=second))
    names = sorted(p.name for p in (tmp_path / "c").glob("*.safetensors"))
    assert len(names) == 8
    for name in names:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_exported_model_gives_the_same_logits_in_transformers(source, tmp_path):
    convert(source, tmp_path / "megatron", Target(kind="megatron", layout=ParallelLayout(tp=4, pp=2)))
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf", max_shard_bytes=200_000))
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    tokens = torch.tensor([[1, 5, 900, 1002, 7]])
    logits = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.bfloat16)(tokens).logits for p in (source, tmp_path / "hf")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pad_rows_are_zero_inside_and_never_exported(source, tmp_path, tp):
    layout = ParallelLayout(tp=tp, pp=2, vocab_divisible_by=128)
    convert(source, tmp_path / "megatron", Target(kind="megatron", layout=layout))
    tables = {}
    for pp, name in ((0, "embedding.word_embeddings.weight"), (1, "output_layer.weight")):
        shards = [load_shard(tmp_path / "megatron", pp, rank)[name] for rank in range(tp)]
        assert all(shard.shape[0] == 1024 // tp for shard in shards)
        tables[pp] = torch.cat(shards)
        assert torch.count_nonzero(tables[pp][1003:]) == 0
    original = load(source)
    assert torch.equal(tables[0][:1003], original["model.embed_tokens.weight"])
    # Tied: the last stage's own copy is the embedding; untied: it is the head, which differs.
    tied = json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    head = original["model.embed_tokens.weight"] if tied else original["lm_head.weight"]
    assert tied == ("lm_head.weight" not in original)
    assert torch.equal(tables[1][:1003], head)


def load_shard(path, pp, tp):
    return load_file(path / f"pp{pp:03d}-tp{tp:03d}-vp000.safetensors")
