"""Inputs that ranks gather as FP8 codes and scales: the bits of gathering BF16, in half of the bytes."""

from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config import GradFormat, LinearPrecision, ParallelConfig, Recompute, SavedActivation, WgradGranularity
from jetrl_megatron.fp8 import GemmPrecision
from tests.dist.gather_run import Layer, blocks_of_one_rank, layers_of_one_rank, steps_of_one_rank
from tests.dist.ranks import run_ranks
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

BF16 = LinearPrecision.bf16
BF16_SIDE = GemmPrecision(linear=BF16, saved_activation=SavedActivation.bf16, dgrad=BF16, wgrad=BF16)
NEEDS_BF16 = GemmPrecision(saved_activation=SavedActivation.bf16, wgrad=BF16)
SWITCHES = {
    "default": GemmPrecision(),
    "blocks": GemmPrecision(wgrad_granularity=WgradGranularity.blocks),
    "requant": GemmPrecision(saved_activation=SavedActivation.fp8_requant),
    "saved bf16": GemmPrecision(saved_activation=SavedActivation.bf16, wgrad_granularity=WgradGranularity.blocks),
    "dgrad bf16": GemmPrecision(dgrad=BF16, grad_format=GradFormat.e5m2),
    "wgrad bf16": GemmPrecision(wgrad=BF16),
    "wgrad bf16 requant": GemmPrecision(wgrad=BF16, saved_activation=SavedActivation.fp8_requant),
    "needs bf16": NEEDS_BF16,
    "bf16 side": BF16_SIDE,
}
WHOLE, RAGGED = 256, 202
"""Tokens: at TP2 a part is 128, and 101, which is no whole group of 128 and no multiple of 4."""
HIDDEN, HEADS_WIDTH, FFN = 256, 512, 512


class Found:
    """What every rank found, by case."""

    def __init__(self, root: Path) -> None:
        dirs = {family: str(write_tiny_model(root / family, family, num_hidden_layers=1)) for family in ("qwen3", "llama", "qwen2")}
        wide = {"hidden_size": 512, "num_key_value_heads": 4, "num_hidden_layers": 1}
        tp2, default = ParallelConfig(tp=2), {"default": SWITCHES["default"]}
        cases = {
            "qwen3": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=SWITCHES, toks=(WHOLE,)),
            "ragged": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=default, toks=(RAGGED,), modes=("grad", "no grad", "frozen")),
            "nosp": Layer(hf_dir=dirs["qwen3"], parallel=ParallelConfig(tp=2, sequence_parallel=False), switches=default, toks=(RAGGED,)),
            "llama": Layer(hf_dir=dirs["llama"], parallel=tp2, switches=default, toks=(WHOLE,)),
            "qwen2": Layer(hf_dir=dirs["qwen2"], parallel=tp2, switches=default, toks=(WHOLE,)),
        }
        self.by_rank: list[dict[str, dict[str, Any]]] = run_ranks(layers_of_one_rank, 2, cases)
        tp4 = Layer(
            hf_dir=str(write_tiny_model(root / "tp4", "qwen3", **wide)), parallel=ParallelConfig(tp=4), switches=default, toks=(512, 8)
        )
        self.of_four: list[dict[str, dict[str, Any]]] = run_ranks(layers_of_one_rank, 4, {"tp4": tp4})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("gather"))


def test_gathered_blocks_are_those_of_the_whole_in_the_layout_of_the_kernels() -> None:
    shapes = [(512, 512), (4, 512), (6, 512), (202, 1024), (1024, 512), (512, 0)]
    for wrong in run_ranks(blocks_of_one_rank, 2, shapes):
        assert len(wrong) == 21 and set(map(tuple, wrong.values())) == {()}, wrong


def test_outputs_and_gradients_are_those_of_gathering_bf16(found: Found) -> None:
    for by_case in (*found.by_rank, *found.of_four):
        for case, result in by_case.items():
            assert result["differing"] == [] and result["zero"] == [], case
            part, mode = case.split("/")[3:]
            weights = {"qkv": ["weight"], "o": ["weight"], "mlp": ["linear_fc1.weight", "linear_fc2.weight"]}[part]
            assert result["names"] == {"grad": ["y", "dx", *weights], "frozen": ["y", "dx"], "no grad": ["y"]}[mode], case


def fp8(rows: int, cols: int, *, t_block: bool = False) -> list[tuple[str, int]]:
    """What is sent of a part [rows, cols]: codes, then scales of 1x128 groups or of 128x128 blocks."""
    scales = rows // 128 * cols // 128 if t_block else rows * cols // 128
    return [("uint8", rows * cols), ("uint8", 4 * scales)]


@pytest.mark.parametrize(
    "case", [f"qwen3/{switches}/{WHOLE}" for switches in SWITCHES if switches != "bf16 side"] + [f"ragged/default/{RAGGED}"]
)
def test_without_gradients_of_weights_codes_and_scales_are_all_that_is_gathered(found: Found, case: str) -> None:
    toks = int(case.split("/")[-1])
    qkv, o, mlp = fp8(toks // 2, HIDDEN), fp8(toks, HEADS_WIDTH // 2), fp8(toks // 2, HIDDEN) + fp8(toks, FFN // 2)
    for part, want, launches in (("qkv", qkv, 1), ("o", o, 1), ("mlp", mlp, 2)):
        for mode in ("no grad", "frozen") if case.startswith("ragged") else ("no grad",):
            result = found.by_rank[0][f"{case}/{part}/{mode}"]
            assert (result["sent"], result["launches"]) == (want, launches), (part, mode)


@pytest.mark.parametrize("switches", ["default", "blocks", "requant", "saved bf16", "dgrad bf16", "wgrad bf16"])
def test_with_gradients_the_transposed_copy_follows_in_the_backward(found: Found, switches: str) -> None:
    blocks = {"t_block": SWITCHES[switches].wgrad_granularity is WgradGranularity.blocks}
    column = fp8(WHOLE // 2, HIDDEN), fp8(HIDDEN, WHOLE // 2, **blocks)
    o = fp8(WHOLE, HEADS_WIDTH // 2), fp8(HEADS_WIDTH // 2, WHOLE, **blocks)
    down = fp8(WHOLE, FFN // 2), fp8(FFN // 2, WHOLE, **blocks)
    mlp = column[0] + down[0] + down[1] + column[1]
    for part, want, launches in (("qkv", column[0] + column[1], 2), ("o", o[0] + o[1], 2), ("mlp", mlp, 4)):
        result = found.by_rank[0][f"qwen3/{switches}/{WHOLE}/{part}/grad"]
        assert (result["sent"], result["launches"]) == (want, launches), part


def test_a_rank_keeps_its_own_part_for_the_backward(found: Found) -> None:
    o, qkv_weight, o_weight = (HEADS_WIDTH // 2, WHOLE), (HIDDEN, 512), (HEADS_WIDTH, HIDDEN // 2)
    for switches, part in (("default", o), ("requant", o[::-1])):
        assert found.by_rank[0][f"qwen3/{switches}/{WHOLE}/o/grad"]["kept"] == [part, o_weight]
    assert found.by_rank[0][f"qwen3/default/{WHOLE}/qkv/grad"]["kept"] == [(HIDDEN, WHOLE // 2), qkv_weight]


def test_requantised_copies_that_wgrad_reads_in_bf16_are_gathered_by_rows_again(found: Found) -> None:
    result = found.by_rank[0][f"qwen3/wgrad bf16 requant/{WHOLE}/o/grad"]
    assert result["sent"] == 2 * fp8(WHOLE, HEADS_WIDTH // 2)


def test_ragged_tokens_with_gradients_are_padded_along_k_and_gathered_in_bf16_along_tokens(found: Found) -> None:
    result = found.by_rank[0][f"ragged/default/{RAGGED}/o/grad"]
    assert result["sent"] == fp8(RAGGED, HEADS_WIDTH // 2) + fp8(HEADS_WIDTH // 2, 256)
    result = found.by_rank[0][f"ragged/default/{RAGGED}/qkv/grad"]
    assert (result["sent"], result["launches"]) == ([("bfloat16", 2 * RAGGED // 2 * HIDDEN)], 0)


def test_bf16_is_gathered_where_the_side_or_the_backward_is_bf16(found: Found) -> None:
    for case in ("bf16 side/256/qkv/grad", "bf16 side/256/o/no grad", "needs bf16/256/qkv/grad", "needs bf16/256/o/grad"):
        result = found.by_rank[0][f"qwen3/{case}"]
        assert result["launches"] == 0 and [dtype for dtype, _ in result["sent"]] == ["bfloat16"], case


def test_without_sequence_parallelism_the_input_along_k_is_gathered_in_fp8(found: Found) -> None:
    assert found.by_rank[0][f"nosp/default/{RAGGED}/qkv/grad"]["sent"] == []
    sent = found.by_rank[0][f"nosp/default/{RAGGED}/o/no grad"]["sent"]
    assert sent == [*fp8(RAGGED, HEADS_WIDTH // 2), ("bfloat16", 2 * RAGGED * HIDDEN // 2)], "the output is gathered in BF16"


def test_a_training_step_is_the_one_of_gathering_bf16(tmp_path: Path) -> None:
    hf_dir = write_tiny_model(tmp_path / "hf", "qwen3", num_hidden_layers=2)
    launches = {Recompute.none: 2, Recompute.full: 3}
    cases = [ParallelConfig(tp=2, micro_batch_toks=128, recompute=recompute) for recompute in launches]
    for results in run_ranks(steps_of_one_rank, 2, str(hf_dir), cases):
        for result, of_a_linear in zip(results, launches.values(), strict=True):
            assert result["differing"] == [] and result["zero"] == []
            assert result["launches"] == of_a_linear * 4 * 2 * result["num_batches"]
            # The hidden states in front of lm_head and the gradient of the embeddings.
            assert sum(dtype == "bfloat16" for dtype, _ in result["sent"]) == 2 * result["num_batches"]
