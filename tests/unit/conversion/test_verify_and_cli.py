"""`verify` finds the first difference between any two kinds; the commands, their JSON and exit codes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.cli import main
from tests.unit.conversion.directories import as_bytes, load, write_bf16, write_fp8
from tests.unit.conversion.shapes import published_config

CONFIG = {**published_config("Qwen3-8B", layers=2, vocab=203), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"intermediate_size": 256}


@pytest.fixture
def source(tmp_path):
    return write_bf16(tmp_path / "source", CONFIG)


def call(capsys, *args):
    """Run one command with --json; return exit code, records and stderr."""
    code = main([*map(str, args), "--json"])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_the_whole_route_by_commands(source, tmp_path, capsys):
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    code, (summary,), _ = call(capsys, "to-megatron", source, a, "--tp", 2, "--pp", 2)
    assert (code, summary["files"], summary["kind"]) == (0, 4, "megatron")
    assert call(capsys, "reshard", a, b, "--tp", 1, "--pp", 2, "--row-parallel", "k_split")[0] == 0
    assert call(capsys, "to-hf", b, out, "--max-shard-gb", 0.0005)[0] == 0
    assert as_bytes(out) == as_bytes(source)
    for left, right in ((source, a), (a, b), (b, out), (out, source)):
        assert call(capsys, "verify", left, right)[:2] == (0, [{"equal": True}])
    for path in (a, b, out):
        code, (record,), _ = call(capsys, "verify", path)
        assert (
            code == 0
            and record["equal"] is True
            and record["tensors_checked"] == sum(len(load_file(p)) for p in path.glob("*.safetensors"))
        )


def test_dry_run_prints_the_plan_and_its_bytes_and_writes_nothing(source, tmp_path, capsys):
    code, records, _ = call(capsys, "to-megatron", source, tmp_path / "a", "--tp", 2, "--dry-run")
    ops, files, summary = [r for r in records if "from" in r], [r for r in records if "file" in r], records[-1]
    assert code == 0 and not (tmp_path / "a").exists() and not (tmp_path / ".a.partial").exists()
    assert [f["file"] for f in files] == ["pp000-tp000-vp000.safetensors", "pp000-tp001-vp000.safetensors"]
    assert sum(f["bytes"] for f in files) == summary["bytes"]
    written = sum(2 * (op["to_rows"][1] - op["to_rows"][0]) * (op["to_cols"][1] - op["to_cols"][0]) for op in ops)
    padding = 2 * 2 * (256 - 203) * 256  # bytes of the pad rows of embedding and head
    assert written + padding == summary["bytes"]
    call(capsys, "to-megatron", source, tmp_path / "a", "--tp", 2)
    assert sum(t.nbytes for p in (tmp_path / "a").glob("*.safetensors") for t in load_file(p).values()) == summary["bytes"]


def test_first_differing_tensor_block_and_values_are_reported(source, tmp_path, capsys):
    call(capsys, "to-megatron", source, tmp_path / "a", "--tp", 2)
    shard = tmp_path / "a" / "pp000-tp001-vp000.safetensors"
    tensors = load_file(shard)
    # Row 128 of rank 1's fused QKV is its second query head's first row: row 2 * 128 + 128 of q_proj.
    tensors["decoder.layers.1.self_attention.linear_qkv.weight"][128, 200] = 7.0
    tensors["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = 9.0
    save_file(tensors, shard)
    code, (record,), _ = call(capsys, "verify", source, tmp_path / "a")
    original = load(source)["model.layers.1.self_attn.q_proj.weight"][384, 200]
    assert code == 1
    assert (record["tensor"], record["what"]) == ("model.layers.1.self_attn.q_proj.weight", "element")
    assert (record["index"], record["block"]) == ([384, 200], [3, 1])
    assert record["values"][0].startswith(repr(float(original))) and record["values"][1].startswith("7.0 ")
    code, (record,), _ = call(capsys, "verify", tmp_path / "a")
    assert (code, record["equal"], record["what"]) == (1, False, "sha256")
    assert record["tensor"] == "pp000-tp001-vp000.safetensors: decoder.layers.1.mlp.linear_fc2.weight"
    assert main(["verify", str(tmp_path / "a")]) == 1 and "linear_fc2.weight: sha256 differs: " in capsys.readouterr().out


def test_fp8_differences_in_scales_codes_and_precision(tmp_path, capsys):
    bf16, fp8 = write_bf16(tmp_path / "bf16", CONFIG), write_fp8(tmp_path / "fp8", CONFIG)
    assert call(capsys, "to-megatron", fp8, tmp_path / "m", "--tp", 2)[0] == 0
    assert call(capsys, "verify", fp8, tmp_path / "m")[:2] == (0, [{"equal": True}])
    _, (record,), _ = call(capsys, "verify", bf16, fp8)
    assert (record["what"], record["values"]) == ("precision", ["BF16", "block FP8"])
    assert call(capsys, "to-hf", fp8, tmp_path / "dequantised", "--cast", "bf16")[0] == 0
    assert call(capsys, "verify", fp8, tmp_path / "dequantised", "--values")[0] == 0
    tensors = load(fp8)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name + "_scale_inv"][1, 0] *= 2
    save_file(tensors, fp8 / "model.safetensors")
    code, (record,), _ = call(capsys, "verify", tmp_path / "m", fp8)
    assert (code, record["tensor"], record["what"], record["block"]) == (1, name + "_scale_inv", "scale", [1, 0])
    tensors[name + "_scale_inv"][1, 0] /= 2
    codes = tensors[name].view(torch.uint8)
    codes[5, 130] ^= 1
    save_file(tensors, fp8 / "model.safetensors")
    _, (record,), _ = call(capsys, "verify", tmp_path / "m", fp8)
    assert (record["tensor"], record["what"], record["index"], record["block"]) == (name, "code", [5, 130], [0, 1])
    assert int(record["values"][0], 16) ^ int(record["values"][1], 16) == 1


def test_quantising_by_command_keeps_named_layers_bf16(source, tmp_path, capsys):
    code, (summary,), _ = call(capsys, "to-hf", source, tmp_path / "fp8", "--cast", "fp8", "--bf16-layer", "*.mlp.down_proj")
    assert (code, summary["fp8_linears"]) == (0, 12)


def test_different_architectures_are_a_difference(source, tmp_path, capsys):
    other = write_bf16(tmp_path / "other", {**CONFIG, "rope_theta": 5.0})
    code, (record,), _ = call(capsys, "verify", source, other)
    assert (code, record["what"], record["values"]) == (1, "architecture", ["rope_theta=10000.0", "rope_theta=5.0"])


@pytest.mark.parametrize(
    "args, words",
    [
        (["to-megatron", "{source}", "{out}", "--tp", "4"], "2 kv heads are fewer than tp=4"),
        (["to-megatron", "{source}", "{out}", "--tp", "1", "--pp", "3"], "2 layers cannot be dealt over pp=3"),
        (["to-megatron", "{out}", "{out}", "--tp", "1"], "is not a directory"),
        (["reshard", "{source}", "{out}", "--tp", "1"], "reshard reads a megatron or torch_dist checkpoint"),
        (["to-megatron", "{source}", "{out}"], "--format ranks needs --tp"),
        (["to-megatron", "{source}", "{out}", "--format", "torch_dist", "--tp", "2", "--pp", "1"], "leave --tp, --pp out"),
        (["to-megatron", "{source}", "{out}", "--tp", "1", "--max-shard-gb", "2"], "leave --max-shard-gb 2 out"),
        (["to-megatron", "{source}", "{out}", "--tp", "1", "--scale-format", "ue8m0"], "--scale-format ue8m0 is the scales' of --cast fp8"),
        (["verify", "{source}", "--values"], "compared with its manifest, byte for byte; leave --values out"),
        (["verify", "{source}", "--hf-config", "{source}"], "compared with its manifest, without a config; leave --hf-config"),
        (["verify", "{source}", "{source}", "--hf-config", "{source}"], "neither checkpoint is a torch_dist one"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--hf-config", "{source}"], "is of kind hf and has its own config.json"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--max-shard-gb", "inf"], "--max-shard-gb is inf; it must be a number above 0"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--max-shard-gb", "nan"], "--max-shard-gb is nan; it must be"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--max-shard-gb", "0"], "--max-shard-gb is 0; it must be"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--max-shard-gb", "-1"], "--max-shard-gb is -1; it must be"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--max-shard-gb", "1e-10"], "a shard of 0 bytes holds nothing"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--workers", "0"], "--workers is 0; it must be at least 1"),
        (["to-megatron", "{source}", "{out}", "--tp", "1", "--bf16-layer", "*.down_proj"], "nothing is quantised; add --cast fp8"),
        (
            ["to-megatron", "{source}", "{out}", "--format", "torch_dist", "--cast", "fp8"],
            "leave --cast fp8 (cast='fp32') out, or write --format ranks",
        ),
        (["to-hf", "{source}", "{out}"], "give --cast bf16 or fp8"),
        (["to-hf", "{source}", "{out}", "--cast", "fp8", "--bf16-layer", "*.nothing"], "'*.nothing' matches no linear"),
        (["verify", "{source}"], "has no conversion_manifest.json; give a second checkpoint"),
    ],
)
def test_wrong_input_exits_2_with_a_message_and_writes_nothing(source, tmp_path, capsys, args, words):
    code, records, err = call(capsys, *(a.format(source=source, out=tmp_path / "out") for a in args))
    assert (code, records) == (2, [])
    assert words in err
    assert not (tmp_path / "out").exists()
