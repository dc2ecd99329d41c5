"""Which kernels a start notes: those that `auto` stands for here and now; a run in whose middle that changes is refused."""

from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

from jetrl_megatron.config import AttentionKernel, Backend, PrecisionConfig, Recipe, RunConfig
from jetrl_megatron.loop.setup import resolved_kernels
from jetrl_megatron.run.run_dir import open_run_dir

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, and the set of what is installed."""
    installed = {"triton", "deep_gemm"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)
    return installed


def test_auto_is_resolved_by_what_is_there(hopper):
    auto = PrecisionConfig()
    assert resolved_kernels(auto, CPU) == {"precision.attention": "reference", "precision.backend": "reference"}
    assert resolved_kernels(auto, CUDA) == {"precision.attention": "flash2", "precision.backend": "deepgemm"}
    hopper.add("vllm")
    assert resolved_kernels(auto, CUDA) == {"precision.attention": "flash3", "precision.backend": "deepgemm"}
    named = PrecisionConfig(attention=AttentionKernel.flash2, backend=Backend.reference)
    assert resolved_kernels(named, CUDA) == {"precision.attention": "flash2", "precision.backend": "reference"}
    with pytest.raises(ValueError, match=r"precision.attention is flash2, which does not run on cpu"):
        resolved_kernels(named, CPU)


def test_a_run_under_which_vllm_was_installed_goes_on_only_with_its_kernel_by_name(hopper, tmp_path):
    recipe = Recipe(run=RunConfig(dir=str(tmp_path / "run")))

    def start(wanted):
        run_dir = open_run_dir(wanted, [], str(CUDA), kernels=resolved_kernels(wanted.precision, CUDA))
        run_dir.lock.close()
        return run_dir

    start(recipe).records.write_text('{"kind": "step", "step": 1}\n')
    hopper.add("vllm")
    with pytest.raises(ValueError, match=r"precision.attention ran flash2 and would now run flash3. Go on with precision.attention=flash2"):
        start(recipe)
    named = replace(recipe, precision=replace(recipe.precision, attention=AttentionKernel.flash2))
    start(named)
    hopper.remove("vllm")
    start(recipe)
