"""What a checkpoint holds of one distributed optimizer: FP32 masters and Adam moments of this rank's shard, in parameter-group order.

Enters and leaves: one of Megatron's distributed optimizers, with torch's AdamW inside or, where the state is offloaded, with Megatron's
`HybridDeviceOptimizer`. Both have the same entries in the same order, so that a run may go on with another `optim.offload_fraction`.
Of an offloaded optimizer the groups hold the BF16 shards, and the masters are its inner parameters, on the host or on the GPU.
"""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

_MASTER = "master_param"
"""Under which `HybridDeviceOptimizer` keeps a parameter's master among its moments."""


def shard_state(part: Any) -> dict[str, Any]:
    """Return clones of masters and moments, and each group's step where it has one."""
    adam = part.optimizer
    groups = []
    for group in adam.param_groups:
        entries = []
        for param in group["params"]:
            moments = {k: _clone(v) for k, v in adam.state.get(param, {}).items() if k != _MASTER}
            entries.append({"master": _master(adam, param).detach().clone(), **moments})
        groups.append({"params": entries, "step": group.get("step")})
    return {"groups": groups}


def load_shard_state(part: Any, saved: dict[str, Any]) -> None:
    """Copy masters in place and put the moments back under the same parameters, each where this optimizer keeps them.

    Raises ValueError where the saved shards are of another layout.
    """
    adam = part.optimizer
    if [len(g["params"]) for g in adam.param_groups] != [len(g["params"]) for g in saved["groups"]]:
        raise ValueError("checkpoint holds other optimizer parameter groups than this layout builds: resume with the same layout")
    updated_by = _updated_by(adam)
    for group, old in zip(adam.param_groups, saved["groups"], strict=True):
        if old["step"] is not None:
            group["step"] = old["step"]
        for param, entry in zip(group["params"], old["params"], strict=True):
            master = _master(adam, param)
            if master.shape != entry["master"].shape:
                raise ValueError(
                    f"optimizer shard is {tuple(entry['master'].shape)} in the checkpoint, {tuple(master.shape)} here: "
                    "resume with the same layout"
                )
            with torch.no_grad():
                master.copy_(entry["master"])
            moments = {k: _beside(v, master) for k, v in entry.items() if k != "master"}
            if moments:
                updated_by[master].state[master] = moments
    if isinstance(adam, HybridDeviceOptimizer):
        # The other way round, `_sync_hdo_state_to_sub_optimizers`, takes every part for one on the host where both kinds are torch's AdamW.
        adam._sync_sub_optimizers_state_to_hdo()


def _updated_by(adam: Any) -> dict[Tensor, Any]:
    """Return which of torch's optimizers updates each master."""
    parts = adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]
    return {master: part for part in parts for group in part.param_groups for master in group["params"]}


def _master(adam: Any, param: Tensor) -> Tensor:
    """Return the FP32 master of a parameter of the optimizer's groups."""
    return adam.param_to_inner_param[param] if isinstance(adam, HybridDeviceOptimizer) else param


def _beside(value: Any, master: Tensor) -> Any:
    """Return a copy on the master's device; the step counter too, where a fused AdamW wants it."""
    return value.detach().to(master.device, copy=True) if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
