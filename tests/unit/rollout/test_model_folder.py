"""What of the model folder must not reach a draw: generation defaults and padding rows of the vocabulary."""

import json
import shutil

import torch

from jetrl_megatron.contracts import SamplingParams
from tests.unit.rollout.drawing import VOCAB, actor_of, differences, draw, prompt

PROMPTS = [prompt(5), prompt(9)]
PARAMS = SamplingParams(max_new_toks=16)


def test_generation_config_of_the_folder_changes_no_draw(qwen3_dir, tmp_path):
    """repetition_penalty, top_k and temperature of generation_config.json are for chat front ends."""
    with actor_of(qwen3_dir) as actor:
        free = draw(actor, PROMPTS, PARAMS)
    folder = tmp_path / "hf"
    shutil.copytree(qwen3_dir, folder)
    unwanted = {"repetition_penalty": 1.1, "top_k": 2, "top_p": 0.1, "temperature": 0.2, "do_sample": True, "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps({**unwanted, "eos_token_id": list(free[0].token_ids)}))
    with actor_of(folder) as actor:
        assert draw(actor, PROMPTS, PARAMS) == free


def test_padding_rows_of_the_vocabulary_are_never_drawn(qwen3_dir):
    """The table has 256 rows for 203 tokens; whatever the other 53 hold, draws and log-probs stay."""
    with actor_of(qwen3_dir) as actor:
        head = actor.chunks[0].head_weight()
        assert head.shape[0] == 256 and torch.count_nonzero(head[VOCAB:]) == 0
        before = draw(actor, PROMPTS, PARAMS, group=4)
        with torch.no_grad():
            head[VOCAB:] = torch.randn(256 - VOCAB, head.shape[1]) * 10
        after = draw(actor, PROMPTS, PARAMS, group=4)
        assert differences(actor, PROMPTS, after).max() == 0.0
    assert before == after
    assert max(t for c in after for t in c.token_ids) < VOCAB
