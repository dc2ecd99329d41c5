"""The MLP of a dense layer: fc1 and SwiGLU in one autograd function, then fc2.

    y = fc2(silu(gate) * up) with [gate | up] = fc1(x)

Enters: [T/TP, 1, H] (sequence parallel) or [T, 1, H] BF16. Leaves: the same shape. The numbers of SwiGLU are fp8/swiglu.py's, the
communication of tensor and sequence parallelism is that of the two linears, parameters and their names are those of Megatron's MLP.
SwiGLU belongs to fc1's autograd function, whose backward writes the operands of fc1's own GEMMs (fp8/linear.py). Where fc1 is FP8 and fc2
has an `input_format`, it gives the FP8 operands of fc2; the GPU backend then does not write the product in BF16. Without gradients
(rollout, reference log-probs, the first forward of recompute) nothing is kept; where fc2 wants BF16 then, the three steps run one by one,
and hooks on the linears see [gate | up] behind fc1 and the product in front of fc2. The bits are the same in every case.
Left out: biases, experts, other activations: no family of this project has one.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from jetrl_megatron.actor.linears import FlowColumnParallelLinear, FlowRowParallelLinear
from jetrl_megatron.fp8 import QuantizedInput
from jetrl_megatron.fp8.backend import kernels_of


class FlowMLP(MLP):
    """Megatron's MLP with this project's linears and SwiGLU.

    It is given to Megatron-core as a class and builds its linears itself: from a ModuleSpec, Megatron-core would hand the tensor-parallel
    group to its own MLP only, and not to a class derived from it.

    Args:
        config: the actor's transformer config.
    """

    def __init__(self, config: Any) -> None:
        """Build fc1 [2F/TP, H] and fc2 in this rank's tensor-parallel group."""
        linears = MLPSubmodules(linear_fc1=FlowColumnParallelLinear, linear_fc2=FlowRowParallelLinear)
        super().__init__(config, linears, tp_group=parallel_state.get_tensor_model_parallel_group())

    def forward(self, hidden_states: Tensor | QuantizedInput, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Map [T/TP, 1, H] or [T, 1, H] to the same shape; the second value is the absent bias. Megatron's scale is for experts."""
        assert per_token_scale is None, "no family of this project has experts"
        return self.linear_fc2(self._activated(hidden_states))

    def _activated(self, hidden_states: Tensor | QuantizedInput) -> Tensor | QuantizedInput:
        """silu(gate) * up, [T, 1, F/TP]; without gradients gate and up are free again when this returns."""
        held = hidden_states.graph_TK if isinstance(hidden_states, QuantizedInput) else hidden_states
        tokens, _ = self.linear_fc1.exchange.whole_shape((held.shape[0], held.shape[-1]))
        h_format = self.linear_fc2.input_format((tokens, self.linear_fc1.weight.shape[0] // 2))
        if torch.is_grad_enabled() or h_format is not None:
            activated: Tensor | QuantizedInput = self.linear_fc1(hidden_states, swiglu=True, h_format=h_format)[0]
            return activated
        gate_up, _ = self.linear_fc1(hidden_states)
        h_TF = kernels_of(self.linear_fc1.flow.backend).swiglu(gate_up.flatten(0, -2))
        return h_TF.view(*gate_up.shape[:-1], h_TF.shape[-1])
