"""`quantization_config` of a Hugging Face config.json against the tensors, in both directions.

Enters: config, architecture and the tensor names. Leaves: which linears are block FP8, or the config that says so. The invariant:
modules with a `weight_scale_inv` and modules of the ignore list partition the linears of the model exactly.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from conversion.architecture import ModelArchitecture
from conversion.layout import BLOCK, LINEARS, check_merged_precision
from conversion.names import SCALE_SUFFIX

_IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers")


def linear_modules(arch: ModelArchitecture) -> list[str]:
    """Return the Hugging Face module names of all linears inside layers, in file order; the head is not among them."""
    return [f"model.layers.{i}.{name}" for i in range(arch.num_layers) for name in LINEARS]


def fp8_modules_of(config: Mapping[str, Any], arch: ModelArchitecture, tensor_names: Iterable[str]) -> frozenset[str]:
    """Return the block-FP8 linears of a checkpoint: those with scales, after checking that the config agrees.

    Raises ValueError where config.json and the tensors contradict each other, or the scheme is not dynamic 128x128 block FP8 (e4m3).
    """
    suffix = ".weight" + SCALE_SUFFIX
    scaled = frozenset(n.removesuffix(suffix) for n in tensor_names if n.endswith(suffix))
    quantization = config.get("quantization_config")
    if quantization is None:
        if scaled:
            raise ValueError(f"config.json has no quantization_config, but {len(scaled)} linears have scales, such as {min(scaled)}")
        return frozenset()
    ignored = _check_types(quantization)
    _check_scheme(quantization)
    others = sorted(scaled - set(linear_modules(arch)))
    if others:
        raise ValueError(
            f"{others[0]} has FP8 scales, as {len(others)} modules do that are not linears of the layers; embedding, norms and head must "
            "be BF16: leave them out of quantisation (modules_to_not_convert) and export again"
        )
    both = sorted(m for m in scaled if _is_ignored(m, ignored))
    neither = sorted(m for m in linear_modules(arch) if m not in scaled and not _is_ignored(m, ignored))
    if both or neither:
        raise ValueError(
            f"config.json and tensors disagree about FP8: {len(both)} linears have scales but are in the ignore list ({_first(both)}), "
            f"{len(neither)} have none but are not in it ({_first(neither)}); mend modules_to_not_convert or export again"
        )
    check_merged_precision(arch, scaled)
    return scaled


def quantization_config(arch: ModelArchitecture, fp8: frozenset[str]) -> dict[str, Any]:
    """Return the quantization_config of a block-FP8 export; the ignore list names every other linear and the head."""
    ignored = [m for m in linear_modules(arch) if m not in fp8]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*ignored, "lm_head"],
    }


def _check_types(quantization: Any) -> list[str]:
    """Return the ignore list; raises ValueError naming the key whose value has another type than JSON of a block-FP8 export."""
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is {quantization!r}; it must be an object, config.json is damaged or of another format")
    ignored: list[str] = []
    for key in (*_IGNORE_KEYS, "weight_block_size"):
        value = quantization.get(key)
        item = int if key == "weight_block_size" else str
        if value is not None and not (isinstance(value, list) and all(type(entry) is item for entry in value)):
            kind = "whole numbers" if item is int else "module names"
            raise ValueError(f"quantization_config.{key} is {value!r}; it must be a list of {kind}, config.json is damaged")
        if item is str:
            ignored += value or []
    return ignored


def _check_scheme(quantization: Mapping[str, Any]) -> None:
    wanted = {"quant_method": ("fp8",), "fmt": ("e4m3", "float8_e4m3fn"), "activation_scheme": ("dynamic",)}
    for key, values in wanted.items():
        found = quantization.get(key, values[0] if key == "fmt" else None)
        if found not in values:
            raise ValueError(
                f"quantization_config.{key} is {found!r}; only {values[0]!r} is supported (block FP8 as DeepSeek and Qwen publish)"
            )
    if list(quantization.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        raise ValueError(
            f"quantization_config.weight_block_size is {quantization.get('weight_block_size')}; only [{BLOCK}, {BLOCK}] is supported"
        )


def _is_ignored(module: str, ignored: list[str]) -> bool:
    """Match as loaders do: the module itself, something that contains it, or its name relative to a parent."""
    return any(module == entry or module.startswith(entry + ".") or module.endswith("." + entry) for entry in ignored)


def _first(names: list[str]) -> str:
    return names[0] if names else "none"
