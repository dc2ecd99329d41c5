import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from jetrl_megatron.config import DataConfig, PromptFormat
from jetrl_megatron.data.prompts import load_prompts, target_token_ids
from jetrl_megatron.data.tokenizer import build_char_tokenizer

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"
LINES = (
    '{"question": "1+1?", "answer": "2"}',
    '{"question": "a very long question indeed", "answer": "3"}',
    '{"question": "why?", "answer": "because of the war"}',
    '{"question": "root?", "answer": "\\\\sqrt{17}", "target": "r"}',
)


def _any_gold(answers: Sequence[str]) -> list[bool]:
    return [True] * len(answers)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"), string.digits + string.ascii_letters + string.punctuation + " \n")


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(LINES))
    return str(path)


def test_dropped_rows_are_counted_and_ids_stay_those_of_the_rows(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Gold that does not parse drops the prompt, with a count."""
    loaded = load_prompts(DataConfig(train=(source,), max_prompt_toks=20), "train", tokenizer)
    assert loaded.dropped == {"too_long": 1, "unparseable_gold": 1}
    assert [prompt.id for prompt in loaded.prompts] == [f"{source}/0", f"{source}/3"]
    assert [prompt.answer for prompt in loaded.prompts] == ["2", r"\sqrt{17}"]
    assert loaded.targets == {f"{source}/0": "2", f"{source}/3": "r"}
    assert loaded.prompts[0].text == "<user>1+1?<assistant>"
    assert loaded.prompts[0].token_ids == tuple(tokenizer.encode("<user>1+1?<assistant>"))


def test_formats_and_instruction(tokenizer: PreTrainedTokenizerBase) -> None:
    base = {"train": ("arithmetic-1digit",), "max_prompts": 1, "instruction": "Box it."}
    chat = load_prompts(DataConfig(**base, system_prompt="Hi"), "train", tokenizer).prompts[0]
    question = chat.text.removeprefix("<system>Hi<user>").removesuffix("\nBox it.<assistant>")
    assert question.endswith("=") and len(question) == 4
    plain = DataConfig(**base, format=PromptFormat.plain, plain_template=r"Q: {question} \boxed{}")
    prompt = load_prompts(plain, "train", tokenizer).prompts[0]
    assert prompt.text == f"Q: {question}\nBox it. \\boxed{{}}"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    with pytest.raises(ValueError, match=r"system_prompt needs data.format=chat"):
        load_prompts(DataConfig(**base, format=PromptFormat.plain, system_prompt="Hi"), "train", tokenizer)


def test_chat_without_a_template_says_the_way_out(tmp_path: Path) -> None:
    bare = build_char_tokenizer(tmp_path, "0123456789+=")
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"data\.format=plain"):
        load_prompts(DataConfig(train=("arithmetic",)), "train", bare)


def test_limits_splits_and_empty_results(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    cfg = DataConfig(train=(source, "arithmetic"), eval=("arithmetic",), max_prompts=5, max_eval_prompts=3)
    train, held_out = (load_prompts(cfg, split, tokenizer, _any_gold) for split in ("train", "eval"))
    assert [prompt.source for prompt in train.prompts] == [source] * 4 + ["arithmetic:train"]
    assert [prompt.source for prompt in held_out.prompts] == ["arithmetic:test"] * 3
    with pytest.raises(ValueError, match=r"no prompt is left.*'too_long': 3"):
        load_prompts(DataConfig(train=(source,), max_prompt_toks=1), "train", tokenizer)
    with pytest.raises(ValueError, match=r"data.eval is empty"):
        load_prompts(DataConfig(train=(source,)), "eval", tokenizer)
    with pytest.raises(ValueError, match="twice"):
        load_prompts(DataConfig(train=(source, source)), "train", tokenizer)


def test_a_file_without_rows_is_said_to_have_none(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match=r"data.train \['.*empty.jsonl'\] holds no rows; name a file or a split that has some"):
        load_prompts(DataConfig(train=(str(path),)), "train", tokenizer)


def test_the_fingerprint_changes_with_anything_that_matters(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    def print_of(**keys: object) -> str:
        return load_prompts(DataConfig(train=(source,), **keys), "train", tokenizer, _any_gold).fingerprint

    prints = [print_of(), print_of(instruction="x"), print_of(max_prompts=1), print_of(system_prompt="x")]
    assert len(set(prints)) == 4 and print_of() == prints[0] and len(prints[0]) == 16
    Path(source).write_text("\n".join(LINES).replace('"2"', '"5"'))
    assert print_of() not in prints


def test_a_reward_of_your_own_may_take_any_gold(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    assert len(load_prompts(DataConfig(train=(source,)), "train", tokenizer, _any_gold).prompts) == 4


def test_targets_end_with_one_end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    assert target_token_ids(tokenizer, "95") == (*tokenizer.encode("95"), tokenizer.eos_token_id)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside this repository")
def test_real_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = DataConfig(train=(f"gsm8k@{SHARED}/gsm8k/train.jsonl",), max_prompts=50)
    loaded = load_prompts(cfg, "train", tokenizer)
    assert len(loaded.prompts) == 50 and loaded.prompts[0].answer == "72"
    assert loaded.targets[loaded.prompts[0].id].endswith("altogether in April and May.\n#### 72")
