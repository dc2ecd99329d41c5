"""Backend resolution, kernel names, precision from the recipe, and the import rule."""

import subprocess
import sys

import pytest
import torch

from jetrl_megatron.config import Arm, Backend, GradFormat, LinearPrecision, PrecisionConfig, SavedActivation, ScaleFormat, WgradGranularity
from jetrl_megatron.fp8 import GemmPrecision, kernel_for, resolve_backend
from jetrl_megatron.fp8.backend import kernels_of

BF16 = LinearPrecision.bf16


def test_auto_is_the_reference_on_a_cpu_and_an_impossible_request_names_the_reason():
    assert resolve_backend(Backend.auto, "cpu") is Backend.reference
    assert resolve_backend(Backend.reference, "cuda") is Backend.reference
    with pytest.raises(ValueError, match="needs a CUDA device"):
        resolve_backend(Backend.deepgemm, "cpu")
    with pytest.raises(ValueError, match="resolve_backend"):
        kernels_of(Backend.auto)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what a machine without a GPU answers")
def test_auto_on_cuda_never_falls_back():
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        resolve_backend(Backend.auto, "cuda")


def test_kernel_names_follow_the_switches():
    shape, fp8 = (16, 256, 128), GemmPrecision(dgrad=BF16)
    names = [kernel_for(g, shape, fp8, Backend.reference) for g in ("fprop", "dgrad", "wgrad")]
    assert names == ["reference.block_fp8.1d2d.bf16", "reference.bf16_f64acc", "reference.block_fp8.1d2d.bf16_then_fp32_add"]
    assert kernel_for("fprop", shape, fp8, Backend.deepgemm) == "deep_gemm.fp8_gemm_nt.1d2d.bf16"
    assert kernel_for("dgrad", shape, fp8, Backend.deepgemm) == "torch.mm.bf16"
    with pytest.raises(ValueError, match="multiples of 128"):
        kernel_for("fprop", (16, 200, 128), fp8, Backend.deepgemm)
    with pytest.raises(ValueError, match="one of"):
        kernel_for("agrad", shape, fp8, Backend.reference)


def test_precision_from_the_recipe():
    jetrl = PrecisionConfig(grad_format=GradFormat.e5m2, rollout_scale_format=ScaleFormat.ue8m0, saved_activation=SavedActivation.bf16)
    train, rollout = (GemmPrecision.from_config(jetrl, side) for side in ("train", "rollout"))
    assert train.scale_format is ScaleFormat.fp32 and rollout.scale_format is ScaleFormat.ue8m0
    assert train.grad_dtype is torch.float8_e5m2 and train.saved_activation is SavedActivation.bf16
    assert (train.wgrad_granularity, train.x_t_block) == (WgradGranularity.blocks, (128, 128))
    shape, groups = (128, 256, 128), GemmPrecision.from_config(PrecisionConfig(wgrad_granularity=WgradGranularity.groups), "train")
    assert (groups.wgrad_granularity, groups.x_t_block) == (WgradGranularity.groups, (1, 128))
    assert kernel_for("wgrad", shape, groups, Backend.deepgemm) == "deep_gemm.fp8_gemm_nt.1d1d.fp32"
    assert kernel_for("wgrad", shape, GemmPrecision(), Backend.deepgemm) == "deep_gemm.fp8_gemm_nt.1d2d.bf16_then_fp32_add"
    broken = PrecisionConfig(arm=Arm.fp8_rollout)
    train, rollout = (GemmPrecision.from_config(broken, side) for side in ("train", "rollout"))
    assert (train.linear, train.dgrad, train.wgrad, train.saved_activation) == (BF16, BF16, BF16, SavedActivation.bf16)
    assert rollout.linear is LinearPrecision.fp8
    with pytest.raises(ValueError, match="side"):
        GemmPrecision.from_config(broken, "actor")
    with pytest.raises(ValueError, match="keeps its backward"):
        GemmPrecision(linear=BF16)


def test_importing_the_package_pulls_in_no_engine():
    code = "import sys, jetrl_megatron.fp8; print([m for m in ('megatron', 'vllm', 'deep_gemm', 'triton.language') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
