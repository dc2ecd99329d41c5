"""The layer spec: the only place where a class is swapped into Megatron-core's transformer layer.

Enters: the actor's transformer config. Leaves: a TransformerBlockSubmodules for one model chunk. Everything around the swapped classes
(TransformerLayer, residual adds) is Megatron-core's own.
"""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from jetrl_megatron.actor.attention import CoreAttention
from jetrl_megatron.actor.linears import FlowColumnParallelLinear, FlowRowParallelLinear
from jetrl_megatron.actor.mlp import FlowMLP
from jetrl_megatron.actor.norm import RMSNorm
from jetrl_megatron.actor.self_attention import FlowSelfAttention


def block_spec(*, num_layers: int, qk_norm: bool) -> TransformerBlockSubmodules:
    """Return the spec of a chunk of `num_layers` layers; `qk_norm` adds RMSNorm on q and k (Qwen3)."""
    head_norm = RMSNorm if qk_norm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=FlowSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=FlowColumnParallelLinear,
                    core_attention=CoreAttention,
                    linear_proj=FlowRowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=FlowMLP,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
