"""Which kernels a start notes: those that `auto` stands for here and now; a run in whose middle that changes is refused."""

from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

from jetrl_megatron.config import (
    AttentionBackward,
    AttentionKernel,
    Backend,
    ModelConfig,
    PrecisionConfig,
    Recipe,
    RunConfig,
    SyntheticModelConfig,
)
from jetrl_megatron.loop.setup import _seed, resolved_kernels
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


def kernels(recipe, device):
    """Attention, its backward, backend."""
    found = resolved_kernels(recipe, device)
    assert list(found) == ["precision.attention", "precision.attention_backward", "precision.backend"]
    return tuple(found.values())


def test_auto_is_resolved_by_what_is_there(hopper):
    auto = Recipe()
    assert kernels(auto, CPU) == ("reference", "reference", "reference")
    assert kernels(auto, CUDA) == ("flash2", "flash2", "deepgemm")
    hopper.add("vllm")
    assert kernels(auto, CUDA) == ("flash3", "flash2", "deepgemm")
    named = Recipe(precision=PrecisionConfig(attention=AttentionKernel.flash2, backend=Backend.reference))
    assert kernels(named, CUDA) == ("flash2", "flash2", "reference")
    with pytest.raises(ValueError, match=r"precision.attention is flash2, which does not run on cpu"):
        resolved_kernels(named, CPU)


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "cudnn"), (128, "cudnn"), (96, "flash2")])
def test_auto_takes_the_backward_of_cudnn_where_it_can_run_and_need_not_repeat_its_bits(hopper, head_dim, expected):
    hopper.add("vllm")
    free = RunConfig(deterministic=False)
    recipe = Recipe(run=free, model=ModelConfig(synthetic=SyntheticModelConfig(head_dim=head_dim)))
    assert kernels(recipe, CUDA) == ("flash3", expected, "deepgemm")
    assert kernels(replace(recipe, run=RunConfig(deterministic=True)), CUDA) == ("flash3", "flash2", "deepgemm")
    named = replace(recipe, precision=PrecisionConfig(attention_backward=AttentionBackward.flash2))
    assert kernels(named, CUDA) == ("flash3", "flash2", "deepgemm")
    named = replace(recipe, precision=PrecisionConfig(attention_backward=AttentionBackward.cudnn))
    if expected == "cudnn":
        assert kernels(named, CUDA) == ("flash3", "cudnn", "deepgemm")
    else:
        with pytest.raises(ValueError, match=r"attention_backward is cudnn, and heads are 96 wide; it is checked for widths 64 and 128"):
            resolved_kernels(named, CUDA)
    with pytest.raises(ValueError, match=r"precision.attention_backward is cudnn, and precision.attention runs reference: use auto or ref"):
        resolved_kernels(named, CPU)
    hopper.remove("vllm")
    with pytest.raises(ValueError, match=r"is cudnn, which takes what flash3 saves, and precision.attention runs flash2: use a Hopper GPU"):
        resolved_kernels(named, CUDA)
    with pytest.raises(ValueError, match=r"precision.attention_backward is reference, which runs on a CPU only: use auto, flash2 or cudnn"):
        resolved_kernels(replace(recipe, precision=PrecisionConfig(attention_backward=AttentionBackward.reference)), CUDA)


def test_a_run_under_which_vllm_was_installed_goes_on_only_with_its_kernel_by_name(hopper, tmp_path):
    recipe = Recipe(run=RunConfig(dir=str(tmp_path / "run")))

    def start(wanted):
        run_dir = open_run_dir(wanted, [], str(CUDA), kernels=resolved_kernels(wanted, CUDA))
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


def test_deterministic_kernels_do_not_fill_every_new_tensor():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.utils.deterministic.fill_uninitialized_memory = True
        _seed(Recipe(run=RunConfig(deterministic=True)), torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled() and not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
