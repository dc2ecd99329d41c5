"""Servers on the actor's own GPUs: how many, where, and which settings contradict them; and when in a step they rest."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from jetrl_megatron import train
from jetrl_megatron.config import Engine, ParallelConfig, Recipe, RolloutConfig, Transport, VllmConfig, WeightLoad
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.colocated import Seat, replica_gpus, settle_vllm


def recipe(engine=Engine.vllm_colocated, tp=1, pp=1, **vllm):
    tp_of_servers = {"tp": tp * pp} if engine is Engine.vllm_colocated else {}
    rollout = RolloutConfig(engine=engine, vllm=VllmConfig(**tp_of_servers | vllm))
    return Recipe(parallel=ParallelConfig(tp=tp, pp=pp), rollout=rollout)


def settled(cfg, num_replicas=2, on_cuda=True):
    vllm = settle_vllm(cfg, num_replicas, on_cuda)
    return vllm.servers, vllm.transport


def test_what_the_recipe_leaves_open_is_what_the_engine_means():
    assert settled(recipe()) == (2, Transport.ipc)
    assert settled(recipe(), on_cuda=False) == (2, Transport.disk)
    assert settled(recipe(servers=2, transport=Transport.disk)) == (2, Transport.disk)
    assert settled(recipe(Engine.vllm_pool)) == (1, Transport.disk)
    assert settled(recipe(Engine.vllm_pool, servers=3, transport=Transport.nccl)) == (3, Transport.nccl)


def test_another_number_of_servers_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.vllm\.servers is 1 .* 2 data-parallel replicas: remove rollout\.vllm\.servers"):
        settle_vllm(recipe(servers=1), 2, True)


def test_ipc_over_pipeline_stages_is_refused():
    with pytest.raises(ValueError, match=r"transport is ipc and parallel\.pp is 2.*set rollout\.vllm\.transport=disk"):
        settle_vllm(recipe(pp=2), 1, True)
    assert settled(recipe(pp=2), on_cuda=False) == (2, Transport.disk)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tp=2"], r"rollout\.vllm\.tp is 1; .*parallel\.tp=2 x parallel\.pp=1: set rollout\.vllm\.tp=2"),
        (["parallel.tp=2", "parallel.pp=2", "rollout.vllm.tp=2"], r"set rollout\.vllm\.tp=4"),
        (["rollout.vllm.gpus=['0']"], r"rollout\.vllm\.gpus is \['0'\].*remove rollout\.vllm\.gpus"),
        (["rollout.vllm.servers=0", "rollout.vllm.urls=['http://h:1']"], r"rollout\.vllm\.urls is .*remove rollout\.vllm\.urls"),
        (["rollout.vllm.transport=nccl"], "NCCL cannot join two processes on one GPU; use ipc or disk"),
    ],
)
def test_settings_that_contradict_the_engine_are_refused_with_the_way_out(tmp_path, words, says):
    path = tmp_path / "r.yaml"
    path.write_text("precision: {arm: bf16}")
    with pytest.raises(ValueError, match=says):
        load_recipe(path, ["rollout.engine=vllm_colocated", *words])
    load_recipe(path, ["rollout.engine=vllm_pool", *words])


def test_what_lies_on_a_disk_is_reloaded_never_written_in_place():
    refused = (
        r"load is in_place and rollout\.vllm\.transport is disk.*set rollout\.vllm\.transport=nccl \(ipc.*or rollout\.vllm\.load=reload"
    )
    with pytest.raises(ValueError, match=refused):
        VllmConfig(load=WeightLoad.in_place, transport=Transport.disk)
    with pytest.raises(ValueError, match=refused):  # a pool's default
        settled(recipe(Engine.vllm_pool, load=WeightLoad.in_place))
    with pytest.raises(ValueError, match=refused):  # colocated on a CPU
        settle_vllm(recipe(load=WeightLoad.in_place), 2, on_cuda=False)
    assert settle_vllm(recipe(load=WeightLoad.in_place), 2, on_cuda=True).transport is Transport.ipc


def seat(replica, stage, tp_rank, gpu, host="one"):
    return Seat(replica=replica, stage=stage, tp_rank=tp_rank, host=host, gpu=gpu)


def test_each_server_gets_the_gpus_of_its_replica_by_stage_and_tp_rank():
    # TP2 x PP2 x DP2 in Megatron's order of ranks: tensor, then data, then pipeline.
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
    seats = [seat(*place, gpu=str(rank)) for rank, place in enumerate(places)]
    assert replica_gpus(seats) == ["0,1,4,5", "2,3,6,7"]
    assert replica_gpus(seats[::-1]) == ["0,1,4,5", "2,3,6,7"]


def test_an_actor_on_two_machines_is_refused():
    with pytest.raises(ValueError, match=r"the actor runs on 2 machines \(one, two\)"):
        replica_gpus([seat(0, 0, 0, "0"), seat(1, 0, 0, "0", host="two")])


def test_the_engine_rests_between_the_rollouts_and_the_update_and_is_pushed_to_behind_it(monkeypatch):
    order = []
    note = lambda name, value=None: lambda *a, **k: order.append(name) or value  # noqa: E731
    rollouts = SimpleNamespace(prompts={}, completions=[], rewards=[])
    for name, value in {"collect": rollouts, "make_samples": [], "learn": {}}.items():
        monkeypatch.setattr(train, name, note(name, value))
    session = SimpleNamespace(
        recipe=recipe(),
        engine=SimpleNamespace(rest=note("rest")),
        publisher=SimpleNamespace(push=note("push")),
        pending=None,
        phases=lambda name: nullcontext(),
    )
    session.phases = type("P", (), {"__call__": lambda self, name: nullcontext(), "take": lambda self: {}})()
    train._step(session, None, 1)
    assert [name for name in order if name in ("collect", "rest", "learn", "push")] == ["collect", "rest", "learn", "push"]
