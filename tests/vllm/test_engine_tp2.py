"""An actor on two ranks and a server on two ranks, on CPUs: verified pushes, answers as of an engine that saw no other weights."""

import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.vllm.engines import write_model
from tests.vllm.push_run import run

WORDS = ["rollout.vllm.tp=2", "rollout.vllm.transport=disk", "rollout.vllm.kv_cache_gib=0.25"]


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_push.py has servers on GPUs")
def test_a_server_on_two_ranks_follows_an_actor_on_two(tmp_path):
    model = write_model(tmp_path / "model", "qwen3", 0, fp8=False)
    (fresh,) = run_ranks(run, 1, str(model), str(tmp_path / "fresh"), [*WORDS, "parallel.tp=1"], True, False)[0]
    first, changed, again = run_ranks(run, 2, str(model), str(tmp_path / "run"), [*WORDS, "parallel.tp=2"], False, False)[0]
    assert first != changed, "the change is too small to be seen"
    assert changed == fresh
    assert again == changed, "a push of the same weights changed something"
