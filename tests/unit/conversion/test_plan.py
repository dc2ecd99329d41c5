"""The planner over random legal models and layouts: every destination element once, sources in range, round trips are identities."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conversion.architecture import ModelArchitecture
from conversion.layout import BLOCK, ParallelLayout, check_layout_of, fp8_modules, stage_layers
from conversion.plan import Plan, make_plan
from conversion.shards import Piece, StoredTensor, hf_tensors, megatron_tensors, vllm_tensors
from tests.unit.conversion.shapes import PUBLISHED, published

SETTINGS = settings(max_examples=40, deadline=None)


@st.composite
def bf16_models(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    return ModelArchitecture.from_hf_config(
        {
            "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
            "num_hidden_layers": draw(st.integers(2, 5)),
            "hidden_size": 4 * draw(st.integers(1, 5)),
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
            "head_dim": draw(st.integers(1, 6)),
            "intermediate_size": 4 * draw(st.integers(1, 4)),
            "vocab_size": draw(st.integers(3, 40)),
            "tie_word_embeddings": draw(st.booleans()),
        }
    )


@st.composite
def fp8_models(draw):
    head_dim = draw(st.sampled_from([64, 128]))
    kv_heads = draw(st.sampled_from([2, 4] if head_dim == 64 else [1, 2]))
    return ModelArchitecture.from_hf_config(
        {
            "model_type": draw(st.sampled_from(["llama", "qwen3"])),
            "num_hidden_layers": 2,
            "hidden_size": draw(st.sampled_from([128, 192, 256])),
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * draw(st.integers(1, 2)),
            "head_dim": head_dim,
            "intermediate_size": 128 * draw(st.integers(1, 4)),
            "vocab_size": draw(st.integers(3, 40)),
            "tie_word_embeddings": draw(st.booleans()),
        }
    )


def is_legal(arch, layout, fp8):
    try:
        check_layout_of(arch, layout, fp8)
    except ValueError:
        return False
    return True


@st.composite
def layouts(draw, arch, fp8=frozenset()):
    """Draw a legal layout: cuts over TP and pipelines are legal independently of each other."""
    cuts = [{"tp": tp, "row_parallel": row} for tp in (1, 2, 3, 4) for row in ("k_complete", "k_split")]
    uneven = (None, 1, 2, 3)
    pipelines = [
        {"pp": pp, "vpp": vpp, "first_stage_layers": first, "last_stage_layers": last}
        for pp, vpp, first, last in itertools.product((2, 3), (1, 2), uneven, uneven)
    ]
    cut = draw(st.sampled_from([c for c in cuts if is_legal(arch, ParallelLayout(**c), fp8)]))
    pipeline = draw(st.sampled_from([{}, *(p for p in pipelines if is_legal(arch, ParallelLayout(**p), frozenset()))]))
    return ParallelLayout(**cut, **pipeline, vocab_divisible_by=draw(st.integers(1, 8)))


Weights = dict[tuple[str, str], np.ndarray]


def labelled(tensors: list[StoredTensor]) -> Weights:
    """Give every element of a Hugging Face description, and every scale, a number of its own."""
    rng, store, start = np.random.default_rng(0), {}, 1
    for stored in tensors:
        rows, cols = stored.rows_cols
        store[stored.location, stored.name] = np.arange(start, start + rows * cols).reshape(rows, cols)
        start += rows * cols
        if stored.fp8:
            store[stored.location, stored.scale_name] = rng.permutation(np.arange(start, start + np.prod(stored.scale_shape))).reshape(
                stored.scale_shape
            )
            start += int(np.prod(stored.scale_shape))
    return store


def run(plan: Plan, store: Weights) -> Weights:
    """Execute a plan on arrays; asserts that no element is written twice, none is missed, and that padding stays zero."""
    result: Weights = {}
    for target_plan in plan.targets:
        target = target_plan.target
        key, scale_key = (target.location, target.name), (target.location, target.scale_name)
        assert key not in result
        result[key] = np.zeros(target.rows_cols, np.int64)
        writes = np.zeros(target.rows_cols, np.int64)
        if target.fp8:
            result[scale_key] = np.zeros(target.scale_shape, np.int64)
            scale_writes = np.zeros(target.scale_shape, np.int64)
        for op in target_plan.ops:
            source = store[op.source.location, op.source.name]
            assert source.shape == op.source.rows_cols
            for span, limit in ((op.source_rows, source.shape[0]), (op.source_cols, source.shape[1])):
                assert 0 <= span[0] < span[1] <= limit
            result[key][slice(*op.target_rows), slice(*op.target_cols)] = source[slice(*op.source_rows), slice(*op.source_cols)]
            writes[slice(*op.target_rows), slice(*op.target_cols)] += 1
            if op.with_scales:
                a, b, c, d = op.scale_ranges
                result[scale_key][slice(*c), slice(*d)] = store[op.source.location, op.source.scale_name][slice(*a), slice(*b)]
                scale_writes[slice(*c), slice(*d)] += 1
        assert writes.max(initial=0) <= 1 and (writes == 0).sum() == target_plan.padding
        if target.fp8:
            assert (scale_writes == 1).all() and (writes == 1).all()
    return result


def assert_same(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for key, array in a.items():
        np.testing.assert_array_equal(array, b[key], err_msg=str(key))


@SETTINGS
@given(st.data())
def test_bf16_route_over_two_layouts_is_the_identity(data):
    arch = data.draw(bf16_models())
    first, second = data.draw(layouts(arch)), data.draw(layouts(arch))
    hf, a, b = hf_tensors(arch), megatron_tensors(arch, first), megatron_tensors(arch, second)
    store = labelled(hf)
    in_a = run(make_plan(hf, a), store)
    in_b = run(make_plan(a, b), in_a)
    assert_same(in_b, run(make_plan(hf, b), store))
    assert_same(run(make_plan(b, hf), in_b), store)
    for op in make_plan(a, hf).replicas:
        one = in_a[op.source.location, op.source.name][slice(*op.source_rows), slice(*op.source_cols)]
        np.testing.assert_array_equal(one, in_a[op.target.location, op.target.name][slice(*op.target_rows), slice(*op.target_cols)])


@SETTINGS
@given(st.data())
def test_fp8_codes_and_scales_travel_together(data):
    arch = data.draw(fp8_models())
    globs = data.draw(st.sampled_from([(), ("*.down_proj",), ("model.layers.1.*",), ("*.self_attn.*",)]))
    fp8 = fp8_modules(arch, globs)
    first, second = data.draw(layouts(arch, fp8)), data.draw(layouts(arch, fp8))
    hf, a, b = hf_tensors(arch, fp8), megatron_tensors(arch, first, fp8), megatron_tensors(arch, second, fp8)
    store = labelled(hf)
    in_b = run(make_plan(a, b), run(make_plan(hf, a), store))
    assert_same(in_b, run(make_plan(hf, b), store))
    assert_same(run(make_plan(b, hf), in_b), store)
    # Every scale stays over the elements it was made for.
    for plan in (make_plan(hf, a), make_plan(a, b), make_plan(b, hf)):
        for op in (op for t in plan.targets for op in t.ops if op.with_scales):
            assert op.source_rows[0] % BLOCK == op.target_rows[0] % BLOCK == 0
            assert op.source_cols[0] % BLOCK == op.target_cols[0] % BLOCK == 0


@SETTINGS
@given(st.data())
def test_vllm_engine_gets_q_k_v_below_each_other_at_its_own_tp(data):
    arch = data.draw(fp8_models())
    fp8 = fp8_modules(arch)
    layout = data.draw(layouts(arch, fp8))
    tp = data.draw(st.sampled_from([t for t in (1, 2) if arch.q_width // t % 128 == 0 and arch.ffn_hidden_size // t % 128 == 0]))
    assume(tp <= arch.num_kv_heads and arch.kv_width // tp % 128 == 0)
    hf = hf_tensors(arch, fp8)
    store = labelled(hf)
    shards = megatron_tensors(arch, layout, fp8)
    engine = run(make_plan(shards, vllm_tensors(arch, tp, fp8)), run(make_plan(hf, shards), store))
    layer = "model.layers.1."
    cut = {"self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.v_proj": 0, "mlp.gate_proj": 0, "mlp.up_proj": 0, "self_attn.o_proj": 1}
    for suffix in ("weight", "weight_scale_inv"):
        q, k, v, gate, up, o = (np.split(store["hf", f"{layer}{name}.{suffix}"], tp, axis) for name, axis in cut.items())
        for rank in range(tp):
            where = f"pp000-tp{rank:03d}-vp000"
            np.testing.assert_array_equal(engine[where, f"{layer}self_attn.qkv_proj.{suffix}"], np.concatenate([q[rank], k[rank], v[rank]]))
            np.testing.assert_array_equal(engine[where, f"{layer}mlp.gate_up_proj.{suffix}"], np.concatenate([gate[rank], up[rank]]))
            np.testing.assert_array_equal(engine[where, f"{layer}self_attn.o_proj.{suffix}"], o[rank])


def test_vllm_replicates_kv_heads_where_it_has_more_ranks():
    arch = published("Qwen3-0.6B", layers=1, num_attention_heads=8, num_key_value_heads=2)
    plan = make_plan(hf_tensors(arch), vllm_tensors(arch, 4))
    qkv = [t for t in plan.targets if t.target.name.endswith("qkv_proj.weight")]
    assert [[op.source_rows for op in t.ops] for t in qkv] == [
        [(256 * rank, 256 * (rank + 1)), (128 * (rank // 2), 128 * (rank // 2 + 1)), (128 * (rank // 2), 128 * (rank // 2 + 1))]
        for rank in range(4)
    ]
    with pytest.raises(ValueError, match="tp=3"):
        vllm_tensors(arch, 3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_plan_at_every_legal_layout(name):
    arch = published(name, layers=5, vocab=151)
    fp8 = fp8_modules(arch) if arch.kv_width % 128 == 0 else frozenset()
    hf = hf_tensors(arch, fp8)
    legal = 0
    for tp in (1, 2, 4, 8):
        for options in ({}, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}, {"pp": 4, "first_stage_layers": 2}, {"pp": 5}):
            for row_parallel in ("k_complete", "k_split"):
                layout = ParallelLayout(tp=tp, row_parallel=row_parallel, **options)
                try:
                    check_layout_of(arch, layout, fp8)
                except ValueError:
                    continue
                legal += 1
                shards = megatron_tensors(arch, layout, fp8)
                out, back = make_plan(hf, shards), make_plan(shards, hf)
                canonical = sum(np.prod(t.shape) for t in hf)
                assert sum(np.prod(t.target.shape) for t in back.targets) == canonical
                assert sum(np.prod(t.target.shape) - t.padding for t in out.targets) >= canonical
                assert len(stage_layers(arch, layout)) == layout.pp
    assert legal >= 8


def test_a_cut_through_a_block_is_refused_by_the_planner_itself():
    shape = (256, 128)
    source = [StoredTensor("hf", "x.weight", shape, (Piece("x.weight", (0, 256), (0, 128)),), fp8=True)]
    halves = [(0, 64), (64, 256)]
    target = [StoredTensor(f"r{i}", "x.weight", (r[1] - r[0], 128), (Piece("x.weight", r, (0, 128)),), True) for i, r in enumerate(halves)]
    with pytest.raises(ValueError, match=r"0\.\.64 on axis 0 goes through a 128x128 block"):
        make_plan(source, target)


def test_a_source_that_lacks_something_or_holds_too_much_is_named():
    arch = published("Qwen3-0.6B", layers=1)
    hf, shards = hf_tensors(arch), megatron_tensors(arch, ParallelLayout())
    with pytest.raises(ValueError, match=r"linear_qkv\.weight needs rows .* of model\.layers\.0\.self_attn\.k_proj\.weight"):
        make_plan([t for t in hf if "k_proj" not in t.name], shards)
    with pytest.raises(ValueError, match=r"1 source tensors are used by no target: hf:model\.norm\.weight"):
        make_plan(hf, [t for t in shards if "final" not in t.name])
