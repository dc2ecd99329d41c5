"""What a checkpoint holds of one distributed optimizer: FP32 masters and Adam moments of this rank's shard, in parameter-group order.

Enters and leaves: one of Megatron's distributed optimizers, with an Adam inside or, where the state is offloaded, with Megatron's
`HybridDeviceOptimizer`, which has several. All give the same entries in the same order, so that a run may go on with another
`optim.offload_fraction`: torch's AdamW counts its steps by parameter, Transformer Engine's and Apex's by group, and an entry has its own.
Of an offloaded optimizer the groups hold the BF16 shards, and the masters are its inner parameters, on the host or on the GPU.
"""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

_MASTER = "master_param"
"""Under which `HybridDeviceOptimizer` keeps a parameter's master among its moments."""


def shard_state(part: Any) -> dict[str, Any]:
    """Return clones of masters and moments; a parameter that has had no step has no moments."""
    adam = part.optimizer
    updated_by = _updated_by(adam)
    groups = []
    for group in adam.param_groups:
        entries = []
        for param in group["params"]:
            master = _master(adam, param)
            owner, owners_group = updated_by[master]
            moments = {k: _clone(v) for k, v in owner.state.get(master, {}).items() if k != _MASTER}
            if moments and not _counts_by_parameter(owner):
                moments["step"] = torch.tensor(float(owners_group["step"]))
            entries.append({"master": master.detach().clone(), **moments})
        groups.append({"params": entries})
    return {"groups": groups}


def load_shard_state(part: Any, saved: dict[str, Any]) -> None:
    """Copy masters in place and put the moments under the same parameters in the place of any others, where this optimizer keeps them.

    Raises ValueError where the saved shards are of another layout.
    """
    adam = part.optimizer
    if [len(g["params"]) for g in adam.param_groups] != [len(g["params"]) for g in saved["groups"]]:
        raise ValueError("checkpoint holds other optimizer parameter groups than this layout builds: resume with the same layout")
    updated_by = _updated_by(adam)
    for master, (owner, owners_group) in updated_by.items():
        owner.state.pop(master, None)
        owners_group.pop("step", None)
    for group, old in zip(adam.param_groups, saved["groups"], strict=True):
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
                moments.setdefault("step", old.get("step"))  # once, a group's counter was written beside its entries
                _put(moments, master, *updated_by[master])
    if isinstance(adam, HybridDeviceOptimizer):
        # The other way round, `_sync_hdo_state_to_sub_optimizers`, takes every part for one on the host where both kinds are torch's AdamW.
        adam._sync_sub_optimizers_state_to_hdo()


def _put(moments: dict[str, Any], master: Tensor, owner: Any, owners_group: dict[str, Any]) -> None:
    """Give moments and the step counter to the optimizer that updates `master`."""
    step = moments.pop("step")
    if _counts_by_parameter(owner):
        moments["step"] = torch.as_tensor(float(step), device=master.device)  # on a GPU too: a fused AdamW wants it there
    else:
        owners_group["step"] = int(step)
    owner.state[master] = moments


def _updated_by(adam: Any) -> dict[Tensor, tuple[Any, dict[str, Any]]]:
    """Return which optimizer, and which of its groups, updates each master."""
    parts = adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]
    return {master: (part, group) for part in parts for group in part.param_groups for master in group["params"]}


def _counts_by_parameter(owner: Any) -> bool:
    return isinstance(owner, torch.optim.AdamW | torch.optim.Adam)


def _master(adam: Any, param: Tensor) -> Tensor:
    """Return the FP32 master of a parameter of the optimizer's groups."""
    return adam.param_to_inner_param[param] if isinstance(adam, HybridDeviceOptimizer) else param


def _beside(value: Any, master: Tensor) -> Any:
    """Return a copy on the master's device."""
    return value.detach().to(master.device, copy=True) if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
