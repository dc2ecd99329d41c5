"""Where a weight's gradient goes: into `weight.main_grad`, as Megatron's fused gradient accumulation does, or back to autograd.

Enters: a parameter and a function that computes its gradient. Leaves: the FP32 sums in `main_grad` with `grad_added_to_main_grad` set, so
that Megatron's gradient hook does not add again; or the gradient itself where the parameter has no `main_grad`.
Invariant: a gradient is added exactly once, and in FP32.
"""

from collections.abc import Callable

import torch


def deliver_weight_gradient(weight: torch.Tensor, compute: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
    """Compute a gradient into `weight.main_grad` and return a stand-in for autograd, or return the gradient in the weight's dtype.

    weight: [N, K] parameter; `main_grad`, where it exists, is [N, K] float32. compute: given `main_grad`, adds the gradient into it in
    place; given None, returns the gradient [N, K].
    The stand-in only makes autograd call the parameter's hooks: nobody reads it. So every use of a weight has to come here, as an embedding
    and a head that share it do. Where Megatron's `weight.zero_out_wgrad` says that one brings its gradient through autograd, or where
    autograd looks for NaN (anomaly mode), it is zeros.
    Raises ValueError where main_grad is not float32.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return compute(None).to(weight.dtype)
    if main_grad.dtype is not torch.float32:
        raise ValueError(f"main_grad is {main_grad.dtype}; gradients accumulate in float32 (accumulate_allreduce_grads_in_fp32)")
    compute(main_grad)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    read = getattr(weight, "zero_out_wgrad", False) or torch.is_anomaly_enabled()
    return torch.zeros_like(weight) if read else torch.empty_like(weight)
