"""Whether a recipe's layout is legal for its model, known from the recipe and a `config.json` before any process starts.

Enters: a `Recipe`. Leaves: nothing, or ValueError naming the value, the limit and the TP degrees that work. The rules themselves (no scale
block cut by a rank boundary, heads and layers that divide) are in `conversion/layout.py`; here they meet the recipe's keys.
"""

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout, check_layout
from jetrl_megatron.config import Arm, ModelConfig, Recipe, SyntheticModelConfig


def check_recipe_layout(recipe: Recipe) -> None:
    """Check tp, pp and vpp against the model; raises ValueError for an illegal layout and for a `model.path` without config.json."""
    parallel, precision = recipe.parallel, recipe.precision
    layout = ParallelLayout(tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, row_parallel=precision.row_parallel.value)
    arch = architecture_of(recipe.model)
    model = recipe.model.path or "model.synthetic"
    try:
        check_layout(arch, layout, fp8=precision.arm is not Arm.bf16, bf16_layers=precision.bf16_layers)
    except ValueError as error:
        keys = f"parallel.tp={parallel.tp}, parallel.pp={parallel.pp}, parallel.vpp={parallel.vpp}, precision.arm={precision.arm.value}"
        raise ValueError(f"{keys} with {model}: {error}") from error


def architecture_of(model: ModelConfig, vocab_size: int = 1) -> ModelArchitecture:
    """Describe the model of a recipe.

    vocab_size: of a synthetic model, which its tokenizer decides; no rule here depends on it. Raises what `ModelArchitecture` raises.
    """
    if model.path:
        return ModelArchitecture.from_hf_directory(model.path)
    return ModelArchitecture.from_hf_config(synthetic_hf_config(model.synthetic, vocab_size))


def synthetic_hf_config(synthetic: SyntheticModelConfig, vocab_size: int) -> dict[str, object]:
    """Give the dimensions of a synthetic model as the keys of a `config.json`; tokenizer ids and lengths are the writer's to add."""
    return {
        "model_type": synthetic.family.value,
        "hidden_size": synthetic.hidden_size,
        "num_hidden_layers": synthetic.num_layers,
        "num_attention_heads": synthetic.num_heads,
        "num_key_value_heads": synthetic.num_kv_heads,
        "head_dim": synthetic.head_dim,
        "intermediate_size": synthetic.ffn_hidden_size,
        "tie_word_embeddings": synthetic.tie_embeddings,
        "initializer_range": synthetic.init_std,
        "vocab_size": vocab_size,
    }
