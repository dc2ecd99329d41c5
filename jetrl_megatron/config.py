"""The recipe as frozen dataclasses: what every key means, its type, its default and the rules between keys.

Enters: nothing (`load.py` fills these from YAML and `key=value`). Leaves: `Recipe`, of which each stage takes only its own part.
Each rule between fields lives in the dataclass that owns the fields; rules that need the model's dimensions live in `layout.py`.
Left out: anything measured at run time.
"""

from dataclasses import dataclass, field
from enum import Enum


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
    """What the forward keeps of X for wgrad (numerics: the three GEMMs)."""

    fp8_dual = "fp8_dual"
    fp8_requant = "fp8_requant"
    bf16 = "bf16"


class GradFormat(Enum):
    """FP8 format of dY."""

    e4m3 = "e4m3"
    e5m2 = "e5m2"


class ScaleFormat(Enum):
    """FP32 scales, or FP32 scales rounded up to powers of two before dividing."""

    fp32 = "fp32"
    ue8m0 = "ue8m0"


class Backend(Enum):
    """Who runs the quantisers and GEMMs. `auto` is `deepgemm` on CUDA and `reference` on a CPU; never a silent change after that."""

    auto = "auto"
    reference = "reference"
    deepgemm = "deepgemm"


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


class PromptFormat(Enum):
    """How a question becomes token ids: the tokenizer's chat template, or the plain template."""

    chat = "chat"
    plain = "plain"


class Recompute(Enum):
    """Activation recompute: none, core attention only, or whole layers."""

    none = "none"
    selective = "selective"
    full = "full"


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ValueError(f"{name} is {value}; it must be at least {low}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run writes, how long it goes and what it keeps."""

    dir: str = ""
    """Empty means `runs/<recipe stem>` with what the command line changed; `load_recipe` fills it in."""
    seed: int = 1234
    steps: int = 100
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    save_every: int = 10
    keep_last: int = 2
    """Complete checkpoints kept; the newest complete one is never deleted."""
    export_hf: bool = True
    tensorboard: bool = True
    wandb: bool = False
    grace_s: float = 60.0
    """Seconds after SIGTERM in which the run must have saved and left."""
    deterministic: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        _at_least("run.steps", self.steps, 0)
        _at_least("run.save_every", self.save_every, 1)
        _at_least("run.keep_last", self.keep_last, 1)
        _at_least("run.eval_every", self.eval_every, 0)


@dataclass(frozen=True, kw_only=True)
class SyntheticModelConfig:
    """A random-weight model of a real family, written as an HF directory before the run; used when `model.path` is empty."""

    family: str = "qwen3"
    """llama, qwen2 or qwen3."""
    hidden_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    ffn_hidden_size: int = 512
    tie_embeddings: bool = True
    init_std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights the actor starts from."""

    path: str = ""
    """HF directory; empty builds `synthetic`."""
    tokenizer: str = ""
    """HF directory of the tokenizer; empty means `path`."""
    synthetic: SyntheticModelConfig = field(default_factory=SyntheticModelConfig)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The precision flow: one key, `arm`, chooses the sides; the rest are ablation switches."""

    arm: Arm = Arm.jetrl
    saved_activation: SavedActivation = SavedActivation.fp8_dual
    dgrad: LinearPrecision = LinearPrecision.fp8
    wgrad: LinearPrecision = LinearPrecision.fp8
    grad_format: GradFormat = GradFormat.e4m3
    scale_format: ScaleFormat = ScaleFormat.fp32
    rollout_scale_format: ScaleFormat | None = None
    """None is the same as `scale_format`; anything else breaks the flow on purpose (ablation)."""
    row_parallel: RowParallel = RowParallel.k_complete
    backend: Backend = Backend.auto
    bf16_layers: tuple[str, ...] = ()
    """HF module-name globs (`*.mlp.down_proj`) that stay BF16 on both sides."""

    @property
    def train_linear(self) -> LinearPrecision:
        """What the actor's linear layers run in."""
        return LinearPrecision.fp8 if self.arm is Arm.jetrl else LinearPrecision.bf16

    @property
    def rollout_linear(self) -> LinearPrecision:
        """What the rollout engine's linear layers run in."""
        return LinearPrecision.bf16 if self.arm is Arm.bf16 else LinearPrecision.fp8


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the actor is cut over ranks; the data-parallel degree is what is left of the world size."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks a pipeline rank; above 1 the interleaved schedule runs."""
    sequence_parallel: bool = True
    micro_batch_toks: int = 4096
    """Packed positions of one micro-batch, before padding to a multiple of 128 * tp."""
    recompute: Recompute = Recompute.none

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("tp", "pp", "vpp"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        _at_least("parallel.micro_batch_toks", self.micro_batch_toks, 128)
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"parallel.vpp is {self.vpp} but parallel.pp is 1; interleaving needs pp of 2 or more, or vpp=1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with FP32 masters, sharded over data-parallel ranks."""

    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay: Decay = Decay.constant
    decay_steps: int = 0
    """Steps until `min_lr`; 0 means run.steps."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Global L2 norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        """Check ranges."""
        _at_least("optim.lr", self.lr, 0.0)
        if self.min_lr > self.lr:
            raise ValueError(f"optim.min_lr is {self.min_lr}, above optim.lr {self.lr}; lower it")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts: files or Hugging Face data sets by name, and how they become token ids."""

    train: tuple[str, ...] = ()
    """Each `NAME`, `NAME:SPLIT`, `PATH.jsonl` or `ADAPTER@PATH.jsonl`; names are listed in data/adapters."""
    eval: tuple[str, ...] = ()
    format: PromptFormat = PromptFormat.chat
    plain_template: str = "{question}"
    system_prompt: str = ""
    instruction: str = ""
    """Appended to the question, for example how to write the final answer."""
    max_prompt_toks: int = 1024
    """Longer prompts are dropped with a count."""
    max_prompts: int = 0
    """0 takes all of `train`."""
    max_eval_prompts: int = 0
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How many completions are drawn a step, and how."""

    engine: Engine = Engine.local
    prompts_per_step: int = 32
    group_size: int = 8
    max_new_toks: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_batch_seqs: int = 256
    """Sequences decoded together by the local engine."""

    def __post_init__(self) -> None:
        """Check ranges and that the trainer can reproduce the sampling distribution (fault D1)."""
        for name in ("prompts_per_step", "group_size", "max_new_toks", "max_batch_seqs"):
            _at_least(f"rollout.{name}", getattr(self, name), 1)
        if not self.temperature > 0.0:
            raise ValueError(f"rollout.temperature is {self.temperature}; training needs sampling, so it must be above 0")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"rollout.top_p is {self.top_p} and rollout.top_k is {self.top_k}: truncated sampling renormalises over the kept "
                "tokens and the trainer does not, so their log-probs differ; use top_p=1.0 and top_k=0 (eval.top_p is free)"
            )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Advantages, the clipped loss, the KL term and the corrections of the baselines."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 1e-3
    """0 builds no reference policy."""
    loss_norm: LossNorm = LossNorm.token
    std_normalize: bool = True
    """Divide group-centred rewards by the group's standard deviation."""
    epochs: int = 1
    """Passes over one rollout batch."""
    minibatches: int = 1
    """Optimizer steps a pass."""
    correction: Correction = Correction.none
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 2.0
    dynamic_sampling: bool = False
    """Groups of zero spread are drawn anew, at most `dynamic_max_rounds` times."""
    dynamic_max_rounds: int = 3
    overlong: Overlong = Overlong.keep
    overlong_buffer_toks: int = 0
    """Length before the limit over which the penalty grows to -1."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("clip_low", "clip_high", "kl_coef"):
            _at_least(f"grpo.{name}", getattr(self, name), 0.0)
        for name in ("epochs", "minibatches"):
            _at_least(f"grpo.{name}", getattr(self, name), 1)
        if not 0.0 < self.icepop_low <= 1.0 <= self.icepop_high:
            raise ValueError(f"grpo.icepop_low, icepop_high are {self.icepop_low}, {self.icepop_high}; they must enclose 1")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How an answer is scored."""

    function: str = "math"
    """`math`, or `package.module:function` taking (completion text, answer) and returning a float."""
    workers: int = 2
    timeout_s: float = 5.0
    """Wall clock for one sample; the worker process is killed and the sample scores 0, counted."""
    memory_mb: int = 1024
    """Address space above its start that one worker may grow by."""
    require_closed_think: bool = True
    """Text inside an unfinished <think> block scores 0."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """A short supervised run on the training answers before step 0; 0 steps skips it."""

    steps: int = 0
    lr: float = 1e-3
    batch_seqs: int = 64


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation."""

    samples: int = 1
    """k of avg@k."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_toks: int = 0
    """0 takes rollout.max_new_toks."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, whole."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
