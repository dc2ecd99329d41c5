"""What ranks exchange around a linear: the bits of Megatron's mappings one after the other, inputs gathered in FP8, beside the GEMMs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config import (
    Arm,
    GradFormat,
    LinearPrecision,
    ParallelConfig,
    PrecisionConfig,
    Recompute,
    RowParallel,
    SavedActivation,
    WgradGranularity,
)
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
        both = default | {"bf16 side": BF16_SIDE}
        nosp, split = ParallelConfig(tp=2, sequence_parallel=False), RowParallel.k_split
        few = {name: SWITCHES[name] for name in ("default", "wgrad bf16", "needs bf16", "bf16 side")}
        every = ("grad", "frozen", "weights", "no grad")
        cases = {
            "qwen3": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=SWITCHES, toks=(WHOLE,)),
            "modes": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=both, toks=(WHOLE, 0), modes=every),
            "split": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=both, toks=(WHOLE,), modes=every, row_parallel=split),
            "ragged": Layer(hf_dir=dirs["qwen3"], parallel=tp2, switches=default, toks=(RAGGED,), modes=("grad", "no grad", "frozen")),
            "nosp": Layer(hf_dir=dirs["qwen3"], parallel=nosp, switches=few, toks=(RAGGED,), modes=every),
            "again": Layer(hf_dir=dirs["qwen3"], parallel=replace(tp2, recompute=Recompute.fc1), switches=both, toks=(WHOLE,), modes=every),
            "llama": Layer(hf_dir=dirs["llama"], parallel=tp2, switches=default, toks=(WHOLE,)),
            "qwen2": Layer(hf_dir=dirs["qwen2"], parallel=tp2, switches=default, toks=(WHOLE,)),
        }
        self.by_rank: list[dict[str, dict[str, Any]]] = run_ranks(layers_of_one_rank, 2, cases)
        tp4 = Layer(
            hf_dir=str(write_tiny_model(root / "tp4", "qwen3", **wide)), parallel=ParallelConfig(tp=4), switches=both, toks=(512, 8)
        )
        self.of_four: list[dict[str, dict[str, Any]]] = run_ranks(layers_of_one_rank, 4, {"tp4": tp4})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("gather"))


def test_gathered_blocks_are_those_of_the_whole_in_the_layout_of_the_kernels() -> None:
    shapes = [(512, 512), (4, 512), (6, 512), (202, 1024), (1024, 512), (512, 0), (0, 512)]
    for wrong in run_ranks(blocks_of_one_rank, 2, shapes):
        assert len(wrong) == 25 and set(map(tuple, wrong.values())) == {()}, wrong


def test_outputs_and_gradients_are_those_of_the_mappings_one_after_the_other(found: Found) -> None:
    for by_case in (*found.by_rank, *found.of_four):
        for case, result in by_case.items():
            toks, part, mode = case.split("/")[2:]
            weights = {"qkv": ["weight"], "o": ["weight"], "mlp": ["linear_fc1.weight", "linear_fc2.weight"]}[part]
            names = {"grad": ["y", "dx", *weights], "frozen": ["y", "dx"], "weights": ["y", *weights], "no grad": ["y"]}[mode]
            assert result["differing"] == [] and result["names"] == names, case
            assert result["zero"] == (names if toks == "0" else []), case


CUT = ["start gather", "dgrad", "start reduce-scatter", "wait for gather", "wgrad", "wait for reduce-scatter"]
WHOLE_ON_EVERY_RANK = ["dgrad", "start all-reduce", "wgrad", "wait for all-reduce"]
OWN = ["dgrad", "wgrad"]


def of_mode(order: list[str], mode: str) -> list[str]:
    """What is left of the order of a linear where X alone, the weights alone or nothing gets a gradient."""
    for_dx = [event for event in order if "reduce" in event or event == "dgrad"]
    return {"grad": order, "frozen": for_dx, "weights": [event for event in order if event not in for_dx], "no grad": []}[mode]


@pytest.mark.parametrize(
    ("case", "column", "row"),
    [
        *((f"qwen3/{switches}/{WHOLE}", CUT, CUT) for switches in SWITCHES if switches != "needs bf16"),
        *((f"modes/{switches}/{toks}", CUT, CUT) for switches in ("default", "bf16 side") for toks in (WHOLE, 0)),
        *((f"nosp/{switches}/{RAGGED}", WHOLE_ON_EVERY_RANK, CUT) for switches in ("default", "wgrad bf16", "bf16 side")),
        *((f"split/{switches}/{WHOLE}", CUT, OWN) for switches in ("default", "bf16 side")),
        (f"qwen3/needs bf16/{WHOLE}", OWN, OWN),
        (f"nosp/needs bf16/{RAGGED}", WHOLE_ON_EVERY_RANK, OWN),
    ],
)
def test_collectives_start_before_the_gemm_they_run_beside_and_are_waited_for_behind_it(
    found: Found, case: str, column: list[str], row: list[str]
) -> None:
    for mode in ("grad",) if case.startswith("qwen3") else ("grad", "weights") if "needs bf16" in case else ("grad", "frozen", "weights"):
        # A frozen input has no gradient to send, the one between fc1 and fc2 has.
        fc2 = of_mode(row, "grad" if mode == "weights" else mode)
        for part, want in (("qkv", of_mode(column, mode)), ("o", of_mode(row, mode)), ("mlp", fc2 + of_mode(column, mode))):
            assert found.by_rank[0][f"{case}/{part}/{mode}"]["order"] == want, (part, mode)


@pytest.mark.parametrize("mode", ["grad", "frozen", "weights"])
def test_rows_that_gate_and_up_are_made_again_of_are_gathered_before_the_x_of_wgrad(found: Found, mode: str) -> None:
    fc2 = of_mode(CUT, "grad" if mode == "weights" else mode)
    start, wait = ["start gather"], ["wait for gather"]
    again = start + (["start gather"] if mode != "frozen" else []) + wait
    in_fp8 = fc2 + again + [event for event in of_mode(CUT, mode) if event != "start gather"]
    # In BF16 the X that comes first is wgrad's as well, which looks for it once more; the GEMM before the gradient's is that of gate and up.
    in_bf16 = fc2 + start + wait + ["dgrad"] + [event for event in of_mode(CUT, mode) if event != "start gather"]
    for switches, want in (("default", in_fp8), ("bf16 side", in_bf16)):
        assert found.by_rank[0][f"again/{switches}/{WHOLE}/mlp/{mode}"]["order"] == want, switches


def fp8(rows: int, cols: int, *, t_block: bool = False) -> list[tuple[str, int]]:
    """What is sent of a part [rows, cols]: codes in words, then scales of 1x128 groups or of 128x128 blocks."""
    scales = rows // 128 * cols // 128 if t_block else rows * cols // 128
    return [("int32", rows * cols), ("int32", 4 * scales)]


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
    # The BF16 weight is [N, K], its FP8 bytes for dgrad [K, N].
    bf16 = found.by_rank[0][f"modes/bf16 side/{WHOLE}/o/grad"]["kept"]
    assert bf16 == [o[::-1], o_weight[::-1]]
    assert found.by_rank[0][f"modes/bf16 side/{WHOLE}/qkv/grad"]["kept"] == [(WHOLE // 2, HIDDEN), qkv_weight[::-1]]
    assert found.by_rank[0][f"modes/bf16 side/{WHOLE}/qkv/frozen"]["kept"] == [qkv_weight[::-1]]
    assert found.by_rank[0][f"modes/bf16 side/{WHOLE}/qkv/weights"]["kept"] == [(WHOLE // 2, HIDDEN)]
    assert found.by_rank[0][f"qwen3/default/{WHOLE}/qkv/grad"]["kept"] == [(HIDDEN, WHOLE // 2), qkv_weight]


def test_requantised_copies_that_wgrad_reads_in_bf16_are_gathered_by_rows_again(found: Found) -> None:
    result = found.by_rank[0][f"qwen3/wgrad bf16 requant/{WHOLE}/o/grad"]
    assert result["sent"] == 2 * fp8(WHOLE, HEADS_WIDTH // 2)


def test_ragged_tokens_with_gradients_are_padded_along_k_and_gathered_in_bf16_along_tokens(found: Found) -> None:
    result = found.by_rank[0][f"ragged/default/{RAGGED}/o/grad"]
    assert result["sent"] == fp8(RAGGED, HEADS_WIDTH // 2) + fp8(HEADS_WIDTH // 2, 256, t_block=True)
    result = found.by_rank[0][f"ragged/default/{RAGGED}/qkv/grad"]
    assert (result["sent"], result["launches"]) == ([("bfloat16", 2 * RAGGED // 2 * HIDDEN)], 0)


def test_bf16_is_gathered_where_the_side_or_the_backward_is_bf16(found: Found) -> None:
    for case in ("bf16 side/256/qkv/grad", "bf16 side/256/o/no grad", "needs bf16/256/qkv/grad", "needs bf16/256/o/grad"):
        result = found.by_rank[0][f"qwen3/{case}"]
        part = WHOLE // 2 * HIDDEN if "qkv" in case else WHOLE * HEADS_WIDTH // 2
        # A BF16 linear gathers again in the backward, an FP8 one whose backward reads BF16 keeps the whole.
        times = 2 if case == "bf16 side/256/qkv/grad" else 1
        assert result["launches"] == 0 and result["sent"] == [("bfloat16", 2 * part)] * times, case


def test_without_sequence_parallelism_the_input_along_k_is_gathered_in_fp8(found: Found) -> None:
    assert found.by_rank[0][f"nosp/default/{RAGGED}/qkv/grad"]["sent"] == []
    sent = found.by_rank[0][f"nosp/default/{RAGGED}/o/no grad"]["sent"]
    assert sent == [*fp8(RAGGED, HEADS_WIDTH // 2), ("bfloat16", 2 * RAGGED * HIDDEN // 2)], "the output is gathered in BF16"


@pytest.mark.parametrize("arm", [Arm.jetrl, Arm.bf16])
def test_a_training_step_is_the_one_of_the_mappings_one_after_the_other(tmp_path: Path, arm: Arm) -> None:
    hf_dir = write_tiny_model(tmp_path / "hf", "qwen3", num_hidden_layers=2)
    # Of a layer's four linears; what fc1 makes again, it makes of codes that are gathered again, or of the BF16 X of its wgrad.
    gathers = {Recompute.none: 8, Recompute.fc1: 9 if arm is Arm.jetrl else 8, Recompute.full: 12}
    cases = [
        (ParallelConfig(tp=2, micro_batch_toks=128, recompute=recompute), PrecisionConfig(arm=arm)) for recompute in gathers
    ]
    cases.append((ParallelConfig(tp=2, micro_batch_toks=128, sequence_parallel=False), PrecisionConfig(arm=arm)))
    for results in run_ranks(steps_of_one_rank, 2, str(hf_dir), cases):
        for result in results:
            assert result["differing"] == [] and result["zero"] == []
        for result, of_a_layer in zip(results, gathers.values(), strict=False):
            num_gathers = of_a_layer * 2 * result["num_batches"]
            assert result["launches"] == (num_gathers if arm is Arm.jetrl else 0)
            # The hidden states in front of lm_head and the gradient of the embeddings.
            others = 2 * result["num_batches"]
            in_bf16 = others if arm is Arm.jetrl else others + num_gathers
            assert sum(dtype == "bfloat16" for dtype, _ in result["sent"]) == in_bf16
