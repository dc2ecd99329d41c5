"""Sharing plain Python values between the ranks of a run: within one model replica, over replicas, over everybody.

Enters: picklable values. Leaves: the same value, or the list by data-parallel rank, on every rank. Invariant: every rank gets equal
values in an order that does not depend on timing, so that all ranks plan the same batches.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu


def is_replica_leader() -> bool:
    """Whether this is the first rank of its model replica (TP rank 0 of pipeline stage 0)."""
    return mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_pipeline_model_parallel_rank() == 0


def from_leader(value: Any) -> Any:
    """Return the replica leader's value on every rank of the replica."""
    group = mpu.get_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def from_last_stage(value: Any) -> Any:
    """Return the last pipeline stage's value on every stage."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=mpu.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def gather_replicas(value: Any) -> list[Any]:
    """Return the values of all data-parallel ranks, by rank."""
    group = mpu.get_data_parallel_group()
    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def any_true(flag: bool, device: torch.device) -> bool:
    """Logical or over all processes."""
    tensor = torch.tensor([int(flag)], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())


def all_true(flag: bool, device: torch.device) -> bool:
    """Logical and over all processes."""
    return not any_true(not flag, device)


def add_up(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the last stage's dictionaries of scalar sums over data-parallel ranks; equal on every rank afterwards."""
    shared = from_last_stage({name: float(value) for name, value in sums.items()})
    total: dict[str, float] = {}
    for part in gather_replicas(shared):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in total.items()}
