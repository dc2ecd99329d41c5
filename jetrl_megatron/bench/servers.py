"""The vLLM servers of a recipe without an actor, for shapes that do not fit on a GPU beside it: `bench rollout --servers-only`.

Enters: a recipe whose `model.path` says which model. Leaves: a RolloutEngine on servers that were started as a run starts its own, that
have drawn their weights themselves (random_worker.py), and that the pool has verified to hold what they drew, as behind a push. All of it
is one process, in no process group.
Left out: pushes. A server that dies ends the bench: the others' tokens a second would not be those of the row.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from jetrl_megatron.bench.random_worker import NAME
from jetrl_megatron.cli import count_processes
from jetrl_megatron.config import Engine, Recipe, VllmConfig, WeightLoad
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.loop.colocated import settle_vllm
from jetrl_megatron.loop.vllm_setup import check_servers, chosen_gpus, server_pool, server_spec
from jetrl_megatron.rollout.fingerprint import algorithm_for
from jetrl_megatron.rollout.published import Expected, Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import Place, RunGroup, VllmEngine
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import digest_of_rectangles, engine_config, write_model_files
from jetrl_megatron.sync.wire import server_fp8

_SEED = 0


@dataclass(kw_only=True)
class ServersAlone:
    """Servers with random weights.

    fp8: module names of the linears that must be FP8 in them. directory: gets what the servers start on.
    """

    recipe: Recipe
    cfg: VllmConfig
    arch: ModelArchitecture
    pool: ServerPool
    fp8: frozenset[str]
    directory: Path
    device: torch.device

    def fill(self) -> None:
        """Start the servers, let each draw its weights and verify them.

        Raises RunFailure where one dies, holds other linears in FP8 than the recipe says, or has parameters that nothing fills.
        """
        start_s, source = time.perf_counter(), Path(self.recipe.model.path)
        print(f"starting {self.cfg.num_servers} servers without an actor", file=sys.stderr, flush=True)
        config = engine_config(self.arch, self.fp8, source)
        write_model_files(self.directory, config, source)
        published = Published(step=0, directory=self.directory, has_weights=False, algorithm=algorithm_for(self.device))
        asked = {
            "config": config,
            "algorithm": published.algorithm,
            "in_place": self.cfg.load is WeightLoad.in_place,
            "seed": _SEED,
        }
        first = threading.Lock()

        def load(client: EngineClient, published: Published) -> None:
            drawn = drawn_weights(client.rpc("jetrl_random_weights", asked, self.cfg.push_timeout_s), self.fp8)
            with first:
                if not published.expected.done():  # the same seed: the other servers are held to what one of them has drawn
                    published.expected.set_result(drawn)

        self.pool.update(published, load)
        self.check_complete()
        print(f"they hold random weights after {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)

    def check_complete(self) -> None:
        """Raise RunFailure where a server does not serve any more."""
        serving = len(self.pool.ready())
        if serving < self.cfg.num_servers:
            raise RunFailure(f"{serving} of {self.cfg.num_servers} servers are left; the warnings above say why")

    def engine(self) -> VllmEngine:
        """Return the engine that draws on them."""
        place = Place(
            replica=0,
            is_leader=True,
            max_positions=self.arch.max_positions,
            vocab_size=self.arch.vocab_size,
            slots=self.cfg.max_num_seqs,
            max_repeats=self.cfg.max_repeats,
        )
        return VllmEngine(self.pool, RunGroup(self.cfg.request_timeout_s), place, self.fill)


def drawn_weights(reports: Sequence[dict[str, Any]], fp8: frozenset[str]) -> Expected:
    """Return what the workers of one server say that they have drawn; raises RunFailure where it is not what `fp8` says."""
    by_rank = sorted(reports, key=lambda report: int(report["rank"]))
    for report in by_rank:
        if report["unknown"]:
            raise RunFailure(f"the servers' model has parameters that no tensor of a checkpoint fills: {', '.join(report['unknown'])}")
        if set(report["fp8_linears"]) != fp8:
            raise RunFailure(
                f"{len(report['fp8_linears'])} linears are FP8 in rank {report['rank']} of a server; the recipe has {len(fp8)}"
            )
    rectangles = [report["expected"] for report in by_rank]
    unsigned = {key: text for report in by_rank for key, text in report["unsigned"].items()}
    return Expected(version=WeightVersion(0, digest_of_rectangles(rectangles)), by_rank=tuple(rectangles), unsigned=unsigned)


def check_servers_only(recipe: Recipe, arch: ModelArchitecture, args: argparse.Namespace) -> None:
    """Raise ValueError for what servers without an actor cannot do."""
    if args.pushes:
        raise ValueError(
            f"--pushes is {args.pushes} and --servers-only builds no actor, whose weights a push brings: leave one of them out"
        )
    if recipe.rollout.vllm.urls:
        raise ValueError(
            f"rollout.vllm.urls is {list(recipe.rollout.vllm.urls)} and --servers-only fills servers that it starts itself: remove "
            "rollout.vllm.urls and set rollout.vllm.servers, or leave --servers-only out"
        )
    if recipe.rollout.vllm.load is WeightLoad.in_place and not torch.cuda.is_available():
        raise ValueError(
            "rollout.vllm.load is in_place, and on a CPU vLLM multiplies by packed copies of its weights: use rollout.vllm.load=reload"
        )
    if args.nproc is not None and recipe.rollout.engine is not Engine.vllm_colocated:
        raise ValueError(
            f"--nproc is {args.nproc} and --servers-only builds no actor, whose processes it counts: leave it out and set "
            "rollout.vllm.servers, or use rollout.engine=vllm_colocated, which has a server for each replica of the actor"
        )
    _settled(recipe, arch, args.nproc)


def _settled(recipe: Recipe, arch: ModelArchitecture, num_processes: int | None) -> tuple[VllmConfig, list[str]]:
    """Return the servers' settings and CUDA_VISIBLE_DEVICES of each, empty on a CPU.

    num_processes: see `servers_alone`. Raises ValueError for servers that this machine or model cannot have.
    """
    replicas, on_cuda = 1, torch.cuda.is_available()
    if recipe.rollout.engine is Engine.vllm_colocated:
        replicas = count_processes(recipe, num_processes) // (recipe.parallel.tp * recipe.parallel.pp)
    cfg = replace(settle_vllm(recipe, replicas, on_cuda), max_restarts=0)
    check_servers(recipe, cfg, arch)
    return cfg, chosen_gpus(cfg, 0) if on_cuda else [""] * cfg.num_servers


@contextmanager
def servers_alone(recipe: Recipe, num_processes: int | None) -> Iterator[ServersAlone]:
    """Give the recipe's servers, not yet started, and stop them whatever happens.

    num_processes: of the actor that is not there: colocated servers take its GPUs; None as in `jetrl train`. Servers of a pool take the
    first GPUs, or those of `rollout.vllm.gpus`. Raises ValueError for servers that this machine or model cannot have.
    """
    on_cuda = torch.cuda.is_available()
    source, run_dir = Path(recipe.model.path), Path(recipe.run.dir)
    arch = ModelArchitecture.from_hf_directory(source)
    cfg, gpus = _settled(recipe, arch, num_processes)
    # Nothing is sent, so that nothing is made ready for NCCL.
    spec = replace(server_spec(recipe, cfg, arch, on_cuda, run_dir), worker=NAME, transport="disk")
    pool = server_pool(recipe, cfg, arch, spec, gpus, source)
    try:
        yield ServersAlone(
            recipe=recipe,
            cfg=cfg,
            arch=arch,
            pool=pool,
            fp8=server_fp8(recipe, arch),
            directory=run_dir / "engine_weights",
            device=torch.device("cuda" if on_cuda else "cpu"),
        )
    finally:
        pool.close()
