"""Merged copies against the planner's operations one by one: the same elements and scales, in fewer copies."""

from dataclasses import replace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout, fp8_modules
from conversion.plan import make_plan
from conversion.shards import hf_tensors, megatron_tensors
from jetrl_megatron.sync.rectangles import runs
from tests.tiny_models import tiny_config


def plan_of(family, tp, precision, row_parallel="k_complete"):
    arch = ModelArchitecture.from_hf_config(tiny_config(family, num_hidden_layers=1).to_dict())
    fp8 = fp8_modules(arch) if precision == "fp8" else frozenset()
    return arch, make_plan(megatron_tensors(arch, ParallelLayout(tp=tp, row_parallel=row_parallel), fp8), hf_tensors(arch, fp8))


@pytest.mark.parametrize("row_parallel", ["k_complete", "k_split"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_merged_copies_are_the_operations(family, tp, precision, row_parallel):
    _, plan = plan_of(family, tp, precision, row_parallel)
    generator = torch.Generator().manual_seed(0)
    values: dict[tuple[str, str, bool], torch.Tensor] = {}
    for target in plan.targets:
        for scales in (False, True) if target.target.fp8 else (False,):
            shape = target.target.scale_shape if scales else target.target.rows_cols
            one_by_one, merged = torch.full(shape, -1.0), torch.full(shape, -1.0)
            for op in target.ops:
                key = op.source.location, op.source.name, scales
                size = op.source.scale_shape if scales else op.source.rows_cols
                values.setdefault(key, torch.rand(size, generator=generator))
                ranges = op.scale_ranges if scales else (op.source_rows, op.source_cols, op.target_rows, op.target_cols)
                rows, cols, to_rows, to_cols = (slice(*span) for span in ranges)
                one_by_one[to_rows, to_cols] = values[key][rows, cols]
            for run in runs(target.ops):
                run.copy(merged, values[run.first.source.location, run.first.source.name, scales], scales=scales)
            assert torch.equal(merged, one_by_one) and (merged >= 0).all(), (target.target.name, scales)


def test_the_heads_of_a_fused_weight_are_one_copy():
    arch, plan = plan_of("qwen3", 1, "fp8")
    assert arch.num_kv_heads > 1
    assert {len(runs(target.ops)) for target in plan.targets} == {1}
    q = next(target for target in plan.targets if target.target.name.endswith("q_proj.weight"))
    assert len(q.ops) == arch.num_kv_heads
    _, halves = plan_of("qwen3", 2, "fp8")
    assert max(len(runs(target.ops)) for target in halves.targets) == 2, "one a rank"


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_what_lies_in_one_piece_is_seen_where_it_lies(precision):
    _, plan = plan_of("qwen3", 1, precision)
    whole = set()
    for target in plan.targets:
        first, *more = runs(target.ops)
        if not first.covers(target.target.rows_cols):
            continue
        whole.add(target.target.name.rpartition(".")[0].rpartition(".")[2])
        assert not more
        for scales in (False, True) if target.target.fp8 else (False,):
            size = first.first.source.scale_shape if scales else first.first.source.rows_cols
            source, shape = torch.rand(size), target.target.scale_shape if scales else target.target.rows_cols
            copied, view = torch.full(shape, -1.0), first.view(source, scales=scales)
            first.copy(copied, source, scales=scales)
            assert torch.equal(view, copied) and view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    assert {"gate_proj", "up_proj", "down_proj", "o_proj", "norm"} <= whole and "q_proj" not in whole
    _, halves = plan_of("qwen3", 2, precision)
    cut = {target.target.name for target in halves.targets if not runs(target.ops)[0].covers(target.target.rows_cols)}
    assert any("down_proj" in name for name in cut), "a rank's part of a tensor is not all of it"


def test_what_does_not_lie_at_equal_distances_is_not_merged():
    _, plan = plan_of("qwen3", 1, "bf16")
    (op,) = next(target for target in plan.targets if target.target.name.endswith("down_proj.weight")).ops
    pieces = [
        replace(op, source_rows=(a, a + 8), target_rows=(b, b + 8)) for a, b in ((0, 0), (16, 8), (32, 16), (40, 24), (48, 40), (40, 48))
    ]
    assert [(run.first, run.count, run.source_step, run.target_step) for run in runs(pieces)] == [
        (pieces[0], 3, 16, 8),
        (pieces[3], 2, 8, 16),
        (pieces[5], 1, 0, 0),
    ]
    narrow = [replace(piece, source_cols=(0, 4 + n), target_cols=(0, 4 + n)) for n, piece in enumerate(pieces[:2])]
    assert len(runs(narrow)) == 2
