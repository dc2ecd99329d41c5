"""Which linears' kernels are compiled before a rollout is timed, and what a failure says."""

import argparse
import subprocess

import pytest
import torch

from jetrl_megatron.bench import precompile, rollout
from jetrl_megatron.bench.shapes import MODELS
from jetrl_megatron.bench.step import architecture
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.load import load_recipe

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"


@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_rank_has_the_shapes_of_the_model(model):
    arch = architecture(model, 2)
    assert sorted(precompile.server_linears(arch, 1)) == sorted(MODELS[model].linears().values())


def test_ranks_cut_columns_along_n_and_rows_along_k():
    whole, half = (precompile.server_linears(architecture("qwen3-8b", 2), tp) for tp in (1, 2))
    assert [(n // 2, k) for n, k in whole[:2]] == half[:2] and [(n, k // 2) for n, k in whole[2:]] == half[2:]


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
        rollout.prepare(load_recipe(TINY, [f"precision.arm={arm}"]), argparse.Namespace(precompile=asked))
    assert len(compiled) == 2 and compiled[0] == [(1024, 256), (1024, 256), (256, 512), (256, 512)]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="bench rollout --precompile times CUDA kernels and torch sees no CUDA device"):
        rollout.prepare(load_recipe(TINY, ["precision.arm=jetrl"]), argparse.Namespace(precompile=True))
