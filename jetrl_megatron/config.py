"""The recipe as frozen dataclasses: what every key means, its type, its default and the rules between keys.

Enters: nothing (`load.py` fills these from YAML and `key=value`). Leaves: `Recipe`; each stage takes only its own part of it. The sections
that say what is learned are in `config_rl.py`, the words to choose between in `choices.py`, and all of them are importable from here.
Each rule between fields lives in the dataclass that owns the fields; rules that need the model's dimensions live in `layout.py`.
Left out: anything measured at run time.
"""

from dataclasses import dataclass, field

from jetrl_megatron.choices import (
    MAX_SECONDS,
    Arm,
    AttentionBackward,
    AttentionKernel,
    Backend,
    Correction,
    Decay,
    Engine,
    Family,
    GradFormat,
    LinearPrecision,
    LossNorm,
    Overlong,
    PromptFormat,
    Recompute,
    RowParallel,
    SavedActivation,
    ScaleFormat,
    Transport,
    WeightLoad,
    WgradGranularity,
    above,
    at_least,
    at_most,
    refuse_non_finite,
    within,
)
from jetrl_megatron.config_rl import (
    SEEDS_PER_STEP,
    DataConfig,
    EvalConfig,
    GrpoConfig,
    RewardConfig,
    RolloutConfig,
    VllmConfig,
    WarmStartConfig,
)

__all__ = [
    "SEEDS_PER_STEP",
    "Arm",
    "AttentionBackward",
    "AttentionKernel",
    "Backend",
    "Correction",
    "DataConfig",
    "Decay",
    "Engine",
    "EvalConfig",
    "Family",
    "GradFormat",
    "GrpoConfig",
    "LinearPrecision",
    "LossNorm",
    "ModelConfig",
    "OptimConfig",
    "Overlong",
    "ParallelConfig",
    "PrecisionConfig",
    "PromptFormat",
    "Recipe",
    "Recompute",
    "RewardConfig",
    "RolloutConfig",
    "RowParallel",
    "RunConfig",
    "SavedActivation",
    "ScaleFormat",
    "SyntheticModelConfig",
    "Transport",
    "VllmConfig",
    "WarmStartConfig",
    "WeightLoad",
    "WgradGranularity",
]


MAX_SEED = 2**63 - 1
MAX_SYNTHETIC_LAYERS, MAX_SYNTHETIC_SIZE = 1000, 2**20
"""A larger model fits no machine, and its check alone would take all memory."""
MIN_EPS = 1e-30
"""Of AdamW: FP32 holds it as a normal number."""


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
    """torch's deterministic algorithms; an operation that has none fails on a CPU and is warned of on CUDA."""

    def __post_init__(self) -> None:
        """Check ranges."""
        within("run.seed", self.seed, 0, MAX_SEED, "the generators take no more")
        at_least("run.steps", self.steps, 0)
        at_least("run.save_every", self.save_every, 1)
        at_least("run.keep_last", self.keep_last, 1)
        at_least("run.eval_every", self.eval_every, 0)
        above("run.grace_s", self.grace_s, 0.0)
        at_most("run.grace_s", self.grace_s, MAX_SECONDS)


@dataclass(frozen=True, kw_only=True)
class SyntheticModelConfig:
    """A random-weight model of a real family, written as an HF directory before the run; used when `model.path` is empty."""

    family: Family = Family.qwen3
    hidden_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    ffn_hidden_size: int = 512
    tie_embeddings: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Check ranges and that each kv head serves the same number of query heads."""
        within("model.synthetic.num_layers", self.num_layers, 1, MAX_SYNTHETIC_LAYERS)
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"):
            within(f"model.synthetic.{name}", getattr(self, name), 1, MAX_SYNTHETIC_SIZE)
        if not 0.0 < self.init_std <= 1.0:
            raise ValueError(f"model.synthetic.init_std is {self.init_std}; it must lie in (0, 1]")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.synthetic.num_heads is {self.num_heads} and model.synthetic.num_kv_heads is {self.num_kv_heads}; "
                "the first must be a multiple of the second"
            )


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
    wgrad_granularity: WgradGranularity = WgradGranularity.blocks
    grad_format: GradFormat = GradFormat.e4m3
    scale_format: ScaleFormat = ScaleFormat.fp32
    rollout_scale_format: ScaleFormat | None = None
    """None is the same as `scale_format`; anything else breaks the flow on purpose (ablation)."""
    row_parallel: RowParallel = RowParallel.k_complete
    backend: Backend = Backend.auto
    attention: AttentionKernel = AttentionKernel.auto
    attention_backward: AttentionBackward = AttentionBackward.auto
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
            at_least(f"parallel.{name}", getattr(self, name), 1)
        at_least("parallel.micro_batch_toks", self.micro_batch_toks, 128)
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
    offload_fraction: float = 0.0
    """Share of masters and moments, by parameters, that lies on the host and is updated there; GPUs only."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("lr", "min_lr", "warmup_steps", "decay_steps", "weight_decay", "clip_grad"):
            at_least(f"optim.{name}", getattr(self, name), 0.0)
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must lie in [0, 1)")
        at_least("optim.eps", self.eps, MIN_EPS)
        within("optim.offload_fraction", self.offload_fraction, 0.0, 1.0)
        if self.min_lr > self.lr:
            raise ValueError(f"optim.min_lr is {self.min_lr}, above optim.lr {self.lr}; lower it")


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

    def __post_init__(self) -> None:
        """Check the rules between sections that need no model, and that no number is infinite or NaN."""
        refuse_non_finite(self)
        if self.run.deterministic and self.precision.attention_backward is AttentionBackward.cudnn:
            raise ValueError(
                "precision.attention_backward is cudnn, which adds in no fixed order, and run.deterministic is true; "
                "set run.deterministic=false, or use flash2"
            )
        if self.rollout.max_staleness and self.grpo.dynamic_sampling:
            raise ValueError(
                f"rollout.max_staleness is {self.rollout.max_staleness} and grpo.dynamic_sampling is true: which groups are drawn anew is "
                "known only when a draw has been scored, and one draw fits beside an update; set grpo.dynamic_sampling=false, or "
                "rollout.max_staleness=0"
            )
        if self.rollout.prompts_per_step % self.grpo.minibatches:
            raise ValueError(
                f"rollout.prompts_per_step is {self.rollout.prompts_per_step} and grpo.minibatches is {self.grpo.minibatches}; "
                "the first must be a multiple of the second"
            )
        model_ranks = self.parallel.tp * self.parallel.pp
        if self.rollout.engine is Engine.vllm_colocated and self.rollout.vllm.tp != model_ranks:
            raise ValueError(
                f"rollout.engine is vllm_colocated and rollout.vllm.tp is {self.rollout.vllm.tp}; a server takes all GPUs of one "
                f"data-parallel replica of the actor, parallel.tp={self.parallel.tp} x parallel.pp={self.parallel.pp}: set "
                f"rollout.vllm.tp={model_ranks}, or use rollout.engine=vllm_pool"
            )
