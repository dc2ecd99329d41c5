"""What one rank does in the tests of the whole loop: train one recipe after another in the processes that are there."""

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from jetrl_megatron.actor import parallel_state
from jetrl_megatron.config import Recipe
from jetrl_megatron.train import train


def train_recipes(recipes: list[Recipe]) -> list[int]:
    """Train each recipe; returns their exit codes. One process group serves all of them."""
    dist.init_process_group("gloo")
    # A run ends the groups that it made; here the next run needs the process group again.
    parallel_state.destroy = mpu.destroy_model_parallel
    codes = [train(recipe, ["test"]) for recipe in recipes]
    dist.destroy_process_group()
    return codes
