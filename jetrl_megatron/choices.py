"""The words that a recipe may choose between, and the range checks of the config dataclasses.

Each member's name equals its value, so a recipe, an error and a dump spell it alike. Import them from `jetrl_megatron.config`.
"""

import math
from dataclasses import fields, is_dataclass
from enum import Enum


class Family(Enum):
    """Model families, by the `model_type` of their config.json."""

    llama = "llama"
    qwen2 = "qwen2"
    qwen3 = "qwen3"


class Arm(Enum):
    """Which side runs FP8 linears."""

    bf16 = "bf16"
    fp8_rollout = "fp8_rollout"
    jetrl = "jetrl"


class LinearPrecision(Enum):
    """What a GEMM of a linear layer runs in."""

    fp8 = "fp8"
    bf16 = "bf16"


class SavedActivation(Enum):
    """What the forward keeps of X for wgrad.

    `fp8_dual`: a second FP8 copy, scaled along T, made of the same BF16 values. `fp8_requant`: the copy that fprop read; the backward
    dequantises it and quantises along T, two roundings. `bf16`: X itself, quantised along T in the backward.
    """

    fp8_dual = "fp8_dual"
    fp8_requant = "fp8_requant"
    bf16 = "bf16"


class GradFormat(Enum):
    """FP8 format of dY."""

    e4m3 = "e4m3"
    e5m2 = "e5m2"


class WgradGranularity(Enum):
    """How X^T is scaled for wgrad.

    `groups`: 1x128 along T, FP32 sums added into main_grad by the GEMM (DeepGEMM 1D1D). `blocks`: 128x128, a BF16 product added
    afterwards (1D2D).
    """

    groups = "groups"
    blocks = "blocks"


class ScaleFormat(Enum):
    """FP32 scales, or FP32 scales rounded up to powers of two before dividing."""

    fp32 = "fp32"
    ue8m0 = "ue8m0"


class Backend(Enum):
    """Who runs the quantisers and GEMMs. `auto` is `deepgemm` on CUDA and `reference` on a CPU; never a silent change after that."""

    auto = "auto"
    reference = "reference"
    deepgemm = "deepgemm"


class AttentionKernel(Enum):
    """Who computes the core attention of packed sequences: `flash3` as vLLM ships and runs it, `flash2` of torch, `reference` on a CPU."""

    auto = "auto"
    reference = "reference"
    flash2 = "flash2"
    flash3 = "flash3"


class AttentionBackward(Enum):
    """Who computes the core attention's backward: `flash2` of torch, `cudnn` for long segments, `reference` on a CPU."""

    auto = "auto"
    reference = "reference"
    flash2 = "flash2"
    cudnn = "cudnn"


class RowParallel(Enum):
    """How a layer whose input is split over TP is computed.

    `k_complete`: gather the input, shard W by output rows: same bits at every TP degree. `k_split`: W sharded along K, partial
    sums added in BF16, as vLLM does at TP > 1.
    """

    k_complete = "k_complete"
    k_split = "k_split"


class Decay(Enum):
    """Learning-rate curve after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class LossNorm(Enum):
    """Denominator of the policy loss: all masked tokens of the global batch, or each sequence's own then the number of sequences."""

    token = "token"
    sequence = "sequence"


class Correction(Enum):
    """Importance correction of the rollout mismatch, for the baselines."""

    none = "none"
    tis = "tis"
    icepop = "icepop"


class Overlong(Enum):
    """What happens to completions cut at the limit: kept, taken out of the loss, or their reward shaped down near the limit."""

    keep = "keep"
    mask = "mask"
    penalty = "penalty"


class Engine(Enum):
    """Which rollout engine."""

    local = "local"
    vllm_pool = "vllm_pool"
    vllm_colocated = "vllm_colocated"


class Transport(Enum):
    """How weights get to the engine servers: through a directory, or from GPU to GPU by NCCL or, on one GPU, CUDA IPC."""

    disk = "disk"
    nccl = "nccl"
    ipc = "ipc"


class WeightLoad(Enum):
    """What a server does with weights that reach it: give them to vLLM's loader, or write them where the model holds them."""

    reload = "reload"
    in_place = "in_place"


class PromptFormat(Enum):
    """How a question becomes token ids: the tokenizer's chat template, or the plain template."""

    chat = "chat"
    plain = "plain"


class Recompute(Enum):
    """What the backward makes again: nothing, fc1's output (gate and up, the largest activation) from the copy of fc1's input that its GEMM
    reads, FP8 or BF16, or whole layers. The core attention always computes its probabilities again."""

    none = "none"
    fc1 = "fc1"
    full = "full"


def at_least(name: str, value: float, low: float) -> None:
    """Raise ValueError, naming key and limit, unless value >= low (so also for NaN)."""
    if not value >= low:
        raise ValueError(f"{name} is {value}; it must be at least {low}")


def at_most(name: str, value: float, high: float) -> None:
    """Raise ValueError, naming key and limit, unless value <= high (so also for NaN)."""
    if not value <= high:
        raise ValueError(f"{name} is {value}; it must be at most {high}")


def above(name: str, value: float, low: float) -> None:
    """Raise ValueError, naming key and limit, unless value > low (so also for NaN)."""
    if not value > low:
        raise ValueError(f"{name} is {value}; it must be above {low}")


def within(name: str, value: float, low: float, high: float, why: str = "") -> None:
    """Raise ValueError, naming key and limits, unless low <= value <= high (so also for NaN); why: the reason."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {high}]{why and ': ' + why}")


MAX_SECONDS = 86_400.0
"""Of a wait: a day."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Of a draw that is not greedy. Below, a logit of an ordinary model over the temperature says nothing in FP32 but which is the largest."""


def check_temperature(name: str, value: float, *, greedy: bool) -> None:
    """Raise ValueError unless value is in the range of temperatures, or 0 where `greedy` draws are allowed."""
    if greedy and value == 0.0:
        return
    way_out = "0 is greedy" if greedy else "training needs sampling, and greedy draws have no spread"
    within(name, value, MIN_TEMPERATURE, MAX_TEMPERATURE, way_out)


def refuse_non_finite(section: object, prefix: str = "") -> None:
    """Raise ValueError naming the first key of a dataclass, or of one inside it, whose value is infinite or no number."""
    assert is_dataclass(section), section
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            refuse_non_finite(value, f"{prefix}{item.name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{prefix}{item.name} is {value}; it must be a finite number")
