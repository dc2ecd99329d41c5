"""Every way of a push to a real server on a GPU: verified, and greedy answers are those of an engine that saw no other weights.

The actor and its server share a GPU where there is one only; over NCCL they are then two hosts to it (tests/dist/ranks.py). All servers
start at the same time: run this file in one process, without pytest-xdist.
"""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.gpu.hopper import NEEDS_HOPPER
from tests.vllm.engines import write_model
from tests.vllm.push_run import run

pytestmark = [
    *NEEDS_HOPPER,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.26"),
]
IPC, NCCL, DISK = ("rollout.vllm.transport=" + name for name in ("ipc", "nccl", "disk"))
IN_PLACE, ENGINE_TP2 = "rollout.vllm.load=in_place", "rollout.vllm.tp=2"
ROUTES = {
    "ipc-in_place": (1, [IPC, IN_PLACE, "parallel.tp=1"]),
    "nccl-in_place": (1, [NCCL, IN_PLACE, "parallel.tp=1"]),
    "ipc-reload": (1, [IPC, "parallel.tp=1"]),
    "nccl-reload": (1, [NCCL, "parallel.tp=1"]),
    "disk": (1, [DISK, "parallel.tp=1"]),
    "ipc-in_place-tp2": (2, [IPC, IN_PLACE, "parallel.tp=2"]),
    "nccl-in_place-tp2": (2, [NCCL, IN_PLACE, "parallel.tp=2"]),
    "nccl-in_place-pp2": (2, [NCCL, IN_PLACE, "parallel.tp=1", "parallel.pp=2"]),
    "ipc-in_place-tp2-tp2": (2, [IPC, IN_PLACE, "parallel.tp=2", ENGINE_TP2]),
    "ipc-reload-tp2-tp2": (2, [IPC, "parallel.tp=2", ENGINE_TP2]),
}
"""Ranks of the actor and words of the recipe. A server on two ranks takes the GPUs of two of the actor's."""
Draws = dict[tuple[str, bool], Future[list[object]]]
FRESH = {"fresh": (1, [DISK, "parallel.tp=1"]), "fresh-tp2": (1, [DISK, "parallel.tp=1", ENGINE_TP2])}
"""Servers on one rank and on two that started on the changed weights and saw no others."""


def fresh_of(route: str) -> str:
    """Which of them a route must answer as."""
    return "fresh-tp2" if ENGINE_TP2 in ROUTES[route][1] else "fresh"


def fits(route: str) -> bool:
    """Whether this machine has a GPU for each rank of the server."""
    return ENGINE_TP2 not in ROUTES[route][1] or torch.cuda.device_count() >= 2


def push(route: str, graphs: bool, model: Path, run_dir: Path) -> list[object]:
    """Return what rank 0 drew after each push of a route."""
    ranks, words = (ROUTES | FRESH)[route]
    shared = torch.cuda.device_count() < ranks + (ENGINE_TP2 not in words)
    server = "0,1" if ENGINE_TP2 in words else ranks if NCCL in words and not shared else 0
    words = [*words, f"rollout.vllm.gpus=['{server}']", f"rollout.vllm.cuda_graphs={str(graphs).lower()}"]
    found = run_ranks(run, ranks, str(model), str(run_dir), words, route in FRESH, shared, shared_gpu=shared, timeout_s=500)
    drawn: list[object] = found[0]
    return drawn


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Draws]:
    """What the servers of the chosen tests draw, by route and CUDA graphs; they start at the same time, with a KV cache of given size."""
    root = tmp_path_factory.mktemp("push")
    model = write_model(root / "model", "qwen3", 0, fp8=False)
    items = [item for item in request.session.items if item.path == request.path]
    asked = {(item.callspec.params["route"], item.callspec.params["graphs"]) for item in items}
    chosen = {(route, graphs) for route, graphs in asked if fits(route)}
    kinds = sorted(chosen | {(fresh_of(route), graphs) for route, graphs in chosen})
    threads = ThreadPoolExecutor(max_workers=len(kinds) or 1)
    yield {kind: threads.submit(push, *kind, model, root / f"{kind[0]}-{kind[1]}") for kind in kinds}
    threads.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("route", list(ROUTES))
def test_pushed_weights_answer_as_in_a_fresh_engine(route: str, graphs: bool, drawn: Draws) -> None:
    if not fits(route):
        pytest.skip("a server on two ranks needs two GPUs")
    (fresh,), (first, changed, again) = drawn[fresh_of(route), graphs].result(), drawn[route, graphs].result()
    assert first != changed, "the change is too small to be seen"
    assert changed == fresh
    assert again == changed, "a push of the same weights changed something"
