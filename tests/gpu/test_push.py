"""Every way of a push to a real server on a GPU: verified, and greedy answers are those of an engine that saw no other weights.

The actor and its server share a GPU where there is one only; over NCCL they are then two hosts to it (tests/dist/ranks.py).
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

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


FRESH = "fresh"
"""A server that started on the changed weights and saw no others."""


def words_of(route: str, graphs: bool) -> list[str]:
    return [*ROUTES["disk" if route == FRESH else route], f"rollout.vllm.cuda_graphs={str(graphs).lower()}"]


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[object]]:
    """What the servers of the chosen tests drew, by route and CUDA graphs; they start at the same time, with a KV cache of given size."""
    root = tmp_path_factory.mktemp("push")
    model = write_model(root / "model", "qwen3", 0, fp8=False)
    chosen = {
        tuple(item.callspec.params[key] for key in ("route", "graphs")) for item in request.session.items if item.path == request.path
    }
    kinds = sorted(chosen | {(FRESH, graphs) for _, graphs in chosen})
    with ThreadPoolExecutor(max_workers=len(kinds)) as threads:
        runs = {}
        for route, graphs in kinds:
            where = str(root / f"{route}-{graphs}")
            runs[route, graphs] = threads.submit(run_ranks, run, 1, str(model), where, words_of(route, graphs), route == FRESH)
        return {kind: run.result()[0] for kind, run in runs.items()}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("route", list(ROUTES))
def test_pushed_weights_answer_as_in_a_fresh_engine(route: str, graphs: bool, drawn: dict[tuple[str, bool], list[object]]) -> None:
    (fresh,), (first, changed, again) = drawn[FRESH, graphs], drawn[route, graphs]
    assert first != changed, "the change is too small to be seen"
    assert changed == fresh
    assert again == changed, "a push of the same weights changed something"
