"""The recipe's sections that say what is learned: prompts, rollout, GRPO, reward, warm start and evaluation.

The sections that say what runs and where, and `Recipe` itself, are in `config.py`, which gives these names too; import them from there.
"""

from dataclasses import dataclass, field

from jetrl_megatron.choices import (
    MAX_SECONDS,
    Correction,
    Engine,
    LossNorm,
    Overlong,
    PromptFormat,
    above,
    at_least,
    at_most,
    check_temperature,
    within,
)
from jetrl_megatron.config_vllm import VllmConfig


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

    def __post_init__(self) -> None:
        """Check ranges and that the plain template has a place for the question."""
        at_least("data.max_prompt_toks", self.max_prompt_toks, 1)
        for name in ("max_prompts", "max_eval_prompts"):
            at_least(f"data.{name}", getattr(self, name), 0)
        if "{question}" not in self.plain_template:
            raise ValueError(f"data.plain_template is {self.plain_template!r}; it must contain {{question}}")


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
    max_staleness: int = 0
    """Rollout batches that the weights may have learned since a token was drawn; 1 draws the next batch while this one is learned."""
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        """Check ranges and that the trainer can reproduce the sampling distribution."""
        for name in ("prompts_per_step", "max_new_toks", "max_batch_seqs"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        within("rollout.max_staleness", self.max_staleness, 0, 1, "one batch is drawn ahead, or none")
        if self.max_staleness and self.engine is not Engine.vllm_pool:
            raise ValueError(
                f"rollout.max_staleness is {self.max_staleness} and rollout.engine is {self.engine.value}: only servers with weights of "
                "their own can draw while the actor learns; set rollout.engine=vllm_pool, or rollout.max_staleness=0"
            )
        if self.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.group_size}; it must be at least 2: an advantage is a reward against the mean of its group, "
                "so in a group of one it is always 0 and nothing is learned"
            )
        check_temperature("rollout.temperature", self.temperature, greedy=False)
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"rollout.top_p is {self.top_p} and rollout.top_k is {self.top_k}: truncated sampling renormalises over the kept "
                "tokens and the trainer does not, so their log-probs differ; use top_p=1.0 and top_k=0 (eval.top_p is free)"
            )
        if self.engine is Engine.vllm_colocated:
            self.vllm.check_colocated()


MAX_MEMORY_MB = 2**31
"""Of a reward worker: 2 PiB, more than an address space grows by."""
SEEDS_PER_STEP = 64
"""Rounds of draws that one step may take, the first included, without sharing a seed with the next step."""


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
            at_least(f"grpo.{name}", getattr(self, name), 0.0)
        for name in ("epochs", "minibatches"):
            at_least(f"grpo.{name}", getattr(self, name), 1)
        if not 0.0 < self.icepop_low <= 1.0 <= self.icepop_high:
            raise ValueError(f"grpo.icepop_low, icepop_high are {self.icepop_low}, {self.icepop_high}; they must enclose 1")
        above("grpo.tis_cap", self.tis_cap, 0.0)
        why = f"a step has {SEEDS_PER_STEP} seeds for its draws"
        within("grpo.dynamic_max_rounds", self.dynamic_max_rounds, 1, SEEDS_PER_STEP - 1, why)
        at_least("grpo.overlong_buffer_toks", self.overlong_buffer_toks, 0)
        if self.overlong is Overlong.penalty and self.overlong_buffer_toks < 1:
            raise ValueError(
                f"grpo.overlong is penalty and grpo.overlong_buffer_toks is {self.overlong_buffer_toks}; "
                "give the number of tokens before the limit over which the penalty grows"
            )


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

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("reward.workers", self.workers, 1)
        above("reward.timeout_s", self.timeout_s, 0.0)
        at_most("reward.timeout_s", self.timeout_s, MAX_SECONDS)
        within("reward.memory_mb", self.memory_mb, 64, MAX_MEMORY_MB)
        if self.function != "math" and not all(self.function.partition(":")):
            raise ValueError(f"reward.function is {self.function!r}; it must be math or package.module:function")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """A short supervised run on the training answers before step 0; 0 steps skips it."""

    steps: int = 0
    lr: float = 1e-3
    batch_seqs: int = 64

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("warm_start.steps", self.steps, 0)
        above("warm_start.lr", self.lr, 0.0)
        at_least("warm_start.batch_seqs", self.batch_seqs, 1)


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

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("eval.samples", self.samples, 1)
        check_temperature("eval.temperature", self.temperature, greedy=True)
        for name in ("top_k", "max_new_toks"):
            at_least(f"eval.{name}", getattr(self, name), 0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"eval.top_p is {self.top_p}; it must lie in (0, 1]")
