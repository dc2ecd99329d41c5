"""Other libraries' quantisers and linears, each behind one signature, where they are installed.

Enters: nothing. Leaves: callables by name; a library that is not installed is absent from the result, and its name is reported as absent.
Left out: any opinion on their numerics; quant.py and linear.py print how far each is from its own float reference.
"""

import importlib.util
from collections.abc import Callable

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]


def torchao_quantizers() -> dict[str, Callable[[torch.Tensor], object]]:
    """torchao's blockwise casts of a BF16 [T, K] matrix."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao.prototype.blockwise_fp8_training import kernels

    return {
        "torchao row": lambda x: kernels.triton_fp8_blockwise_act_quant_lhs(x, 128),
        "torchao transposed": lambda x: kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x, 128),
        "torchao weight": lambda x: kernels.triton_fp8_blockwise_weight_quant_rhs(x, block_size=128),
    }


def vllm_quantizer() -> dict[str, Callable[[torch.Tensor], object]]:
    """vLLM's CUDA op for 1x128 groups."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return {"vllm row": lambda x: per_token_group_quant_fp8(x, 128, column_major_scales=True, tma_aligned_scales=True)}


def torchao_linear(weight: torch.Tensor) -> Linear | None:
    """torchao's blockwise FP8 linear over `weight` [N, K]; it quantises the weight in every forward and backward."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    return lambda x: fp8_blockwise_mm.apply(x, weight, 128, torch.bfloat16, False)


def transformer_engine_linear(weight: torch.Tensor) -> Linear | None:
    """Transformer Engine's linear under its blockwise recipe with FP32 scales, holding a copy of `weight` [N, K]."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    n, k = weight.shape
    module = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=weight.device)
    with torch.no_grad():
        module.weight.copy_(weight)
    scales = QParams(power_2_scale=False, amax_epsilon=0.0)
    recipe = Float8BlockScaling(fp8_quant_fwd_inp=scales, fp8_quant_fwd_weight=scales, fp8_quant_bwd_grad=scales)

    def run(x: torch.Tensor) -> torch.Tensor:
        module.weight.grad = None  # else autograd adds to the last iteration's, which no other variant pays for
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return module(x)

    return run
