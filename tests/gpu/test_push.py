"""Every way of a push to a real server on a GPU: verified, and greedy answers are those of an engine that saw no other weights.

The actor and its server share a GPU where there is one only; over NCCL they are then two hosts to it (tests/dist/ranks.py).
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.gpu.push_run import run
from tests.vllm.engines import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None, reason="needs a GPU and vLLM 0.26"),
]
HERE, OTHER = "rollout.vllm.gpus=['0']", f"rollout.vllm.gpus=['{int(torch.cuda.device_count() > 1)}']"
ROUTES = {
    "ipc-in_place": [HERE, "rollout.vllm.transport=ipc", "rollout.vllm.load=in_place"],
    "nccl-in_place": [OTHER, "rollout.vllm.transport=nccl", "rollout.vllm.load=in_place"],
    "ipc-reload": [HERE, "rollout.vllm.transport=ipc"],
    "nccl-reload": [OTHER, "rollout.vllm.transport=nccl"],
    "disk": [HERE, "rollout.vllm.transport=disk"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("push") / "model", "qwen3", 0, fp8=False)


@pytest.fixture(scope="module")
def fresh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[object]]:
    """What a server that started on the changed weights draws, with CUDA graphs and without."""
    drawn = {}
    for graphs in (True, False):
        words = [*ROUTES["disk"], f"rollout.vllm.cuda_graphs={str(graphs).lower()}"]
        ((drawn[graphs],),) = run_ranks(run, 1, str(model), str(tmp_path_factory.mktemp("fresh") / "run"), words, True)
    return drawn


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("route", list(ROUTES))
def test_pushed_weights_answer_as_in_a_fresh_engine(
    route: str, graphs: bool, model: Path, fresh: dict[bool, list[object]], tmp_path: Path
) -> None:
    words = [*ROUTES[route], f"rollout.vllm.cuda_graphs={str(graphs).lower()}"]
    ((first, changed, again),) = run_ranks(run, 1, str(model), str(tmp_path / "run"), words, False)
    assert first != changed, "the change is too small to be seen"
    assert changed == fresh[graphs]
    assert again == changed, "a push of the same weights changed something"
