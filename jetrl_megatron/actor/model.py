"""The policy network: Megatron-core's GPTModel for dense Llama-3.x, Qwen2.5 and Qwen3, with this project's layer spec.

Enters: ModelArchitecture, ParallelConfig, the ranks. Leaves: one `PolicyModel` for each model chunk of this pipeline rank, empty
weights. The model ends at the final norm: logits are made by `logprobs.py`, which never holds [T, V] in FP32 at once, with the BF16
lm_head weight. Invariant: dropout is 0, rope lives in the core attention, the residual stream is BF16.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout, padded_vocab_size, stage_layers
from jetrl_megatron.actor.embedding import NO_TOKEN, FlowEmbedding
from jetrl_megatron.actor.flash import resolve_attention, resolve_backward
from jetrl_megatron.actor.packed import PackedContext
from jetrl_megatron.actor.parallel_state import Ranks
from jetrl_megatron.actor.rope import RopeTable, inverse_frequencies
from jetrl_megatron.actor.spec import block_spec
from jetrl_megatron.config import AttentionBackward, AttentionKernel, ParallelConfig, PrecisionConfig, Recompute, RowParallel


@dataclass
class FlowTransformerConfig(TransformerConfig):
    """Megatron's TransformerConfig with what the swapped classes need at construction."""

    flow_device: Any = None
    """Where parameters are allocated."""
    flow_row_parallel: RowParallel = RowParallel.k_complete
    flow_recompute_fc1: bool = False
    flow_rope: RopeTable | None = None
    """One table for all layers."""
    flow_attention: AttentionKernel = AttentionKernel.reference
    """Resolved, never `auto`."""
    flow_attention_backward: AttentionBackward = AttentionBackward.reference
    """Resolved, never `auto`."""


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns the hidden states behind the final norm instead of logits."""

    def __init__(self, config: FlowTransformerConfig, **kwargs: Any) -> None:
        """Build Megatron's model, then put this project's embedding in the place of its own, around the same parameter."""
        super().__init__(config, **kwargs)
        if self.pre_process:
            self.embedding.word_embeddings = FlowEmbedding.in_place_of(self.embedding.word_embeddings, config)
            if self.share_embeddings_and_output_weights:
                # Megatron marks a weight that embedding and head share so that it adds what autograd brings. Here both add by themselves.
                self.embedding.word_embeddings.weight.zero_out_wgrad = False

    def _preprocess(self, *args: Any, input_ids: Tensor, packed_seq_params: PackedContext, **kwargs: Any) -> Any:
        """Embed, with zero rows at padding: every linear then sees zeros there, which add nothing to the amax of a wgrad group."""
        if self.pre_process:
            padding = torch.arange(input_ids.shape[1], device=input_ids.device) >= packed_seq_params.num_real_toks
            input_ids = input_ids.masked_fill(padding, NO_TOKEN)
        return super()._preprocess(*args, input_ids=input_ids, packed_seq_params=packed_seq_params, **kwargs)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [T/TP, 1, H] (sequence parallel) or [T, 1, H] on every stage."""
        return hidden_states

    def head_weight(self) -> Tensor:
        """Return this rank's rows of lm_head, [V_padded/TP, H] BF16; the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def model_layout(parallel: ParallelConfig, row_parallel: RowParallel) -> ParallelLayout:
    """Return the weight layout that a parallel config and the row-parallel kind stand for."""
    return ParallelLayout(tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, row_parallel=row_parallel.value)


def transformer_config(
    arch: ModelArchitecture, parallel: ParallelConfig, precision: PrecisionConfig, device: torch.device, *, deterministic: bool
) -> FlowTransformerConfig:
    """Translate architecture and layout into Megatron's config; no other place sets a field of it.

    deterministic: kernels that add in no fixed order are not chosen.
    """
    attention = resolve_attention(precision.attention, device)
    recompute: dict[str, Any] = {}
    if parallel.recompute is Recompute.full:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return FlowTransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        layernorm_epsilon=arch.rms_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,  # its name only: FlowMLP computes SwiGLU itself
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
        # One batch of the interleaved schedule sends and receives in both directions. With two stages both are the same peer, which matches
        # them in the order they were issued: activations would arrive as gradients. So the interleaved schedule issues them one by one.
        batch_p2p_comm=parallel.vpp == 1,
        overlap_p2p_comm=parallel.vpp > 1,
        finalize_model_grads_func=reduce_gradients,
        flow_device=device,
        flow_row_parallel=precision.row_parallel,
        flow_recompute_fc1=parallel.recompute is Recompute.fc1,
        flow_attention=attention,
        flow_attention_backward=resolve_backward(precision.attention_backward, attention, arch.head_dim, deterministic=deterministic),
        flow_rope=RopeTable(inverse_frequencies(arch.head_dim, arch.rope_theta, arch.rope_scaling), device, torch.bfloat16),
        **recompute,
    )


def reduce_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients over all groups; the token count is not used, since the batch's weights hold the denominator."""
    finalize_model_grads(model, None, **kwargs)


def build_chunks(
    arch: ModelArchitecture, config: FlowTransformerConfig, layout: ParallelLayout, ranks: Ranks, *, trainable: bool
) -> list[PolicyModel]:
    """Build the model chunks of this pipeline rank, weights uninitialised.

    Args:
        arch: the model's dimensions.
        config: from `transformer_config`.
        layout: from `model_layout`; decides which layers are here.
        ranks: this process's place.
        trainable: False freezes every parameter (the reference policy).
    """
    chunks = []
    layers = stage_layers(arch, layout)
    for stage in range(layout.vpp):
        first = ranks.pp_rank == 0 and stage == 0
        last = ranks.pp_rank == layout.pp - 1 and stage == layout.vpp - 1
        chunk = PolicyModel(
            config,
            transformer_layer_spec=block_spec(num_layers=len(layers[ranks.pp_rank, stage]), qk_norm=arch.qk_norm),
            vocab_size=padded_vocab_size(arch, layout.tp, layout.vocab_divisible_by),
            max_sequence_length=arch.max_positions,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tie_embeddings,
            position_embedding_type="none",
            vp_stage=stage if layout.vpp > 1 else None,
        )
        _mark_sharded(chunk)
        chunks.append(chunk.requires_grad_(trainable).to(config.flow_device))
    return chunks


def _mark_sharded(chunk: PolicyModel) -> None:
    """Tell Megatron which parameters are cut over TP ranks: it does so itself only where it initialises them.

    The gradient norm counts an unmarked parameter on TP rank 0 alone.
    """
    cut = [module for module in chunk.modules() if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)]
    for parameter in (parameter for module in cut for parameter in module.parameters(recurse=False)):
        if not getattr(parameter, "tensor_model_parallel", False):
            _clear_marks(parameter)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def _clear_marks(parameter: Tensor) -> None:
    """Remove Megatron's default marks, so that they can be set."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, name):
            delattr(parameter, name)
