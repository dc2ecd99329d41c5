"""Which linears' kernels are compiled before a rollout is timed, and what a failure says."""

import argparse
import subprocess

import pytest
import torch

from conversion.layout import fp8_modules
from jetrl_megatron.bench import precompile, rollout
from jetrl_megatron.bench.shapes import MODELS
from jetrl_megatron.bench.timed_actor import architecture
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.load import load_recipe

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"


def asked_for(precompile: bool) -> argparse.Namespace:
    return argparse.Namespace(precompile=precompile, servers_only=False, prompt_toks=8, new_toks=8)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_rank_has_the_shapes_of_the_model(model):
    arch = architecture(model, 2)
    assert sorted(precompile.server_linears(arch, 1, fp8_modules(arch))) == sorted(MODELS[model].linears().values())


def test_ranks_cut_columns_along_n_and_rows_along_k():
    arch = architecture("qwen3-8b", 2)
    half, whole = precompile.server_linears(arch, 2, fp8_modules(arch)), MODELS["qwen3-8b"].linears()
    assert set(half) == {(whole[c][0] // 2, whole[c][1]) for c in ("qkv", "fc1")} | {(whole[r][0], whole[r][1] // 2) for r in ("o", "fc2")}
    assert len(half) == 4


def test_what_stays_in_bf16_is_left_out_and_equal_shapes_are_compiled_once():
    arch = architecture("qwen3-8b", 2)
    assert len(precompile.server_linears(arch, 1, fp8_modules(arch, ("*.down_proj",)))) == 3
    assert precompile.server_linears(arch, 1, frozenset()) == []


def test_a_failure_names_the_linear_and_its_cause(monkeypatch):
    def run(words, **options):
        failed = words[-2:] == ["256", "128"]
        return subprocess.CompletedProcess(words, int(failed), "", "no nvcc" if failed else "")

    monkeypatch.setattr(precompile.subprocess, "run", run)
    assert precompile.precompile([(128, 128)]) >= 0.0
    with pytest.raises(RunFailure, match=r"a linear \[256, 128\] left with 1: no nvcc"):
        precompile.precompile([(128, 128), (256, 128)])


def test_only_an_arm_with_fp8_servers_compiles_and_only_where_asked(monkeypatch):
    compiled = []
    monkeypatch.setattr(rollout, "precompile", lambda linears: compiled.append(linears) or 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arm, asked in (("bf16", True), ("jetrl", False), ("jetrl", True), ("fp8_rollout", True)):
        rollout.prepare([load_recipe(TINY, [f"precision.arm={arm}"])], asked_for(asked))
    assert len(compiled) == 2 and sorted(compiled[0]) == [(256, 512), (1024, 256)]
    arms = [load_recipe(TINY, [f"precision.arm={arm}"]) for arm in ("bf16", "jetrl", "fp8_rollout")]
    rollout.prepare(arms, asked_for(True))
    assert len(compiled) == 3, "two FP8 arms have one model: its kernels are compiled once"


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="bench rollout --precompile times CUDA kernels and torch sees no CUDA device"):
        rollout.prepare([load_recipe(TINY, ["precision.arm=jetrl"])], asked_for(True))
