"""Rows to prompts: template, token ids, what is dropped, and the fingerprint that a resume compares.

Enters: a `DataConfig` and a tokenizer. Leaves: a `PromptSet`. A prompt is dropped, and counted, when it is longer than
`data.max_prompt_toks` or its gold answer cannot be compared with. Sources are read in the order given, and with
`data.max_prompts` reading ends as soon as that many prompts are kept.
Invariant: the ids (source and row number) and the token ids depend on nothing but the sources, the config and the tokenizer.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from transformers import PreTrainedTokenizerBase

from jetrl_megatron.config import DataConfig, PromptFormat
from jetrl_megatron.contracts import Prompt
from jetrl_megatron.data.adapters import Row
from jetrl_megatron.data.sources import parse_source, read_rows
from jetrl_megatron.grpo.rewards import gold_parses

_LOG = logging.getLogger(__name__)
_CHUNK_ROWS = 16_384
"""Rows whose gold answers are checked together: one start of the reward workers for each."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one split, and what became of the rows that are not among them."""

    prompts: tuple[Prompt, ...]
    targets: Mapping[str, str]
    """Prompt id -> the text a warm start teaches, without the end-of-sequence token."""
    dropped: Mapping[str, int]
    """`too_long` and `unparseable_gold` -> rows."""
    fingerprint: str
    """16 hex digits over ids, token ids and answers, in order."""


def load_prompts(
    cfg: DataConfig,
    split: Literal["train", "eval"],
    tokenizer: PreTrainedTokenizerBase,
    check_gold: Callable[[Sequence[str]], list[bool]] = gold_parses,
) -> PromptSet:
    """Read, format and tokenise the prompts of `data.train` or `data.eval`.

    check_gold: says of each gold answer whether it can be used; pass one that always agrees for a reward of your own.
    Raises ValueError for a source that cannot be read, two prompts of one id, or when no prompt is left.
    """
    sources, limit = (cfg.train, cfg.max_prompts) if split == "train" else (cfg.eval, cfg.max_eval_prompts)
    if not sources:
        raise ValueError(f"data.{split} is empty; name at least one source")
    prompts: dict[str, Prompt] = {}
    targets: dict[str, str] = {}
    dropped = {"too_long": 0, "unparseable_gold": 0}
    rows = _rows(sources, evaluating=split == "eval")
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        usable = check_gold([row.answer for _, _, row in chunk])
        for (source, number, row), parses in zip(chunk, usable, strict=True):
            if limit and len(prompts) == limit:
                break
            if not parses:
                dropped["unparseable_gold"] += 1
                continue
            prompt = make_prompt(cfg, tokenizer, row, f"{source}/{number}", source)
            if len(prompt.token_ids) > cfg.max_prompt_toks:
                dropped["too_long"] += 1
                continue
            if prompt.id in prompts:
                raise ValueError(f"data.{split} names the source {source!r} twice; name it once")
            prompts[prompt.id] = prompt
            targets[prompt.id] = row.target
        if limit and len(prompts) == limit:
            break
    kept = tuple(prompts.values())
    _LOG.info("data.%s: %d prompts kept, dropped %s", split, len(kept), dropped)
    if not kept and not any(dropped.values()):
        raise ValueError(f"data.{split} {list(sources)} holds no rows; name a file or a split that has some")
    if not kept:
        raise ValueError(
            f"data.{split} {list(sources)}: no prompt is left, dropped {dropped}; raise data.max_prompt_toks or check the answers"
        )
    return PromptSet(prompts=kept, targets=targets, dropped=dropped, fingerprint=fingerprint(kept))


def make_prompt(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row, prompt_id: str, source: str) -> Prompt:
    """Format and tokenise one row.

    `data.instruction` follows the question on its own line. `chat` renders the tokenizer's template, which writes its own special tokens;
    `plain` puts the question into `data.plain_template` and lets the tokenizer add what it adds to any text (a beginning-of-sequence
    token, but no end). Raises ValueError when the tokenizer has no chat template, or for a system prompt that `plain` has no place
    for.
    """
    question = f"{row.question}\n{cfg.instruction}" if cfg.instruction else row.question
    if cfg.format is PromptFormat.chat:
        if not tokenizer.chat_template:
            raise ValueError("data.format is chat but the tokenizer has no chat template; use data.format=plain or another tokenizer")
        system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
        messages = [*system, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        if cfg.system_prompt:
            raise ValueError("data.system_prompt needs data.format=chat; with data.format=plain write it into data.plain_template")
        text = cfg.plain_template.replace("{question}", question)
        ids = tokenizer.encode(text, add_special_tokens=True)
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
            ids = ids[:-1]
    return Prompt(id=prompt_id, token_ids=tuple(ids), text=text, answer=row.answer, source=source)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return 16 hex digits that change with any id, token id, answer, or the order of the prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]


def target_token_ids(tokenizer: PreTrainedTokenizerBase, target: str) -> tuple[int, ...]:
    """Return the token ids of a supervised target with one end-of-sequence token; ValueError when the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token; a warm start needs one to teach where an answer ends")
    return (*tokenizer.encode(target, add_special_tokens=False), int(tokenizer.eos_token_id))


def _rows(sources: Sequence[str], evaluating: bool) -> Iterator[tuple[str, int, Row]]:
    for text in sources:
        source = parse_source(text, evaluating)
        for number, row in read_rows(source):
            yield source.name, number, row
