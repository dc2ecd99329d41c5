"""The kernel of `mix` against its definition in torch, in Triton's interpreter where there is no GPU; actor and worker give one text."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.names import SCALE_SUFFIX
from conversion.shards import hf_tensors
from jetrl_megatron.rollout import fingerprint as module
from jetrl_megatron.rollout import held_views, tiles, triton_fingerprint, vllm_worker
from jetrl_megatron.rollout.fingerprint import Hashing, fingerprint, unsigned_zero
from jetrl_megatron.rollout.held_views import KeptViews
from jetrl_megatron.rollout.published import Fingerprints, engine_pieces
from jetrl_megatron.rollout.tiles import place_of
from jetrl_megatron.rollout.vllm_worker import _Reader
from tests.rectangles import DEVICE, by_kernel, matrix, words
from tests.tiny_models import tiny_config

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]


@pytest.fixture
def kernel(monkeypatch):
    """Take the kernel's path on a CPU too."""
    monkeypatch.setattr(module, "_has_kernel", lambda tensor: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (37, 53), (130, 24), (3, 9000), (5, 1030), (300, 1)])
def test_any_rectangle_at_any_place_has_the_sums_of_the_definition(kernel, dtype, shape):
    rows, cols = shape
    base = matrix(rows + 3, cols + 11, dtype)
    parts = [base[r : r + rows, c : c + cols] for r, c in ((0, 0), (1, 3), (2, 8))]
    parts += [base[:rows], base[:rows].reshape(-1)[5:], base[0, 1:cols], parts[1].t(), base[1, 2], base[:, 1], base[:0]]
    parts.append(base[:1, 2:].expand(4, -1))
    assert by_kernel(*parts) == [fingerprint(part, "mix") for part in parts]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 17), st.integers(0, 17), st.sampled_from(DTYPES))
def test_no_width_gap_or_address_changes_a_sum(rows, cols, gap, at, dtype):
    flat = matrix(1, rows * (cols + gap) + at, dtype).view(-1)
    part = flat[at:].view(rows, cols + gap)[:, :cols]
    sums = triton_fingerprint.mixed_sums([place_of(part)], module.LANES, part.device)
    num_bytes = part.numel() * part.element_size()
    assert "mix:" + "".join(f"{(s + num_bytes) % 2**64:016x}" for s in sums[0].tolist()) == fingerprint(part, "mix")


@pytest.mark.parametrize("programs", [1, 2, 3, 1000])
def test_sums_do_not_depend_on_how_tiles_fall_to_programs(kernel, monkeypatch, programs):
    monkeypatch.setattr(tiles, "PROGRAMS", programs)
    wide, flat = matrix(7, 3 * 8192 + 40, torch.uint8)[:, :-24], words(1, 5 * 8192 + 3)
    narrow = matrix(300, 88, torch.uint8)[:, 8:72]
    assert by_kernel(wide, flat, narrow) == [fingerprint(part, "mix") for part in (wide, flat, narrow)]


def test_the_definition_is_pinned(kernel):
    """Actor and engine may be installed apart: a text that changed would fail every push."""
    data = torch.arange(1000, dtype=torch.int64).mul(37).to(torch.uint8).to(DEVICE)[:997]
    assert by_kernel(data)[0] == fingerprint(data, "mix") == "mix:d0c6759b6ec1735cf9c69b4f65d3ef40"


def test_words_that_change_move_or_swap_show(kernel):
    base = matrix(20, 64, torch.uint8)
    changed = []
    for row, col in ((0, 0), (19, 63), (10, 33)):
        changed.append(base.clone())
        changed[-1][row, col] ^= 1
    swapped = base.clone()
    swapped[3, :8], swapped[3, 8:16] = base[3, 8:16], base[3, :8]
    changed += [swapped, base.flip(0), base.roll(8), base[:19], torch.cat((base, torch.zeros_like(base[:1])))]
    prints = by_kernel(base, *changed)
    assert len(set(prints)) == len(prints)
    lanes = [text.removeprefix("mix:") for text in prints]
    assert len({lane[:16] for lane in lanes}) == len({lane[16:] for lane in lanes}) == len(prints), "each lane sees every change"


def test_one_launch_does_all_that_are_read_in_one_way(kernel, monkeypatch):
    """1200 tensors of a byte to 80 KiB, side by side: cut, at odd places, with rows that end within words, and without a byte."""
    launched, real = [], triton_fingerprint.mix_kernel

    class Launches:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                launched.append((options["UNIT"], options["WRAPS"], options["COLS"]))
                real[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(triton_fingerprint, "mix_kernel", Launches())
    base = matrix(90, 1040)
    parts = [base[n % 80 :, : 8 * (n % 3)] if n % 50 == 0 else words(n, 1 + 8 * (n % 5)) for n in range(1190)]
    parts += [base, base[:, 8:72], base[1:40, 3:9], base[:, 4:1000], base.view(-1)[2:30000], base.view(-1)[1:], base.t(), base[5:, 16:]]
    parts += [matrix(60, 34, torch.bfloat16)[:, 1:30], matrix(9, 7, torch.float32)]
    assert len(parts) == 1200 and by_kernel(*parts) == [fingerprint(part, "mix") for part in parts]
    assert len(launched) == len(set(launched)) == 9


def test_many_tensors_come_back_in_their_order_and_more_may_follow(kernel, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", 300)
    hashing, wanted = Hashing("mix"), {}
    for number in range(8):
        tensor = words(number, 100 + number)
        wanted[str(number)] = fingerprint(tensor, "mix")
        hashing.add(str(number), tensor)
    assert "7" in hashing and "8" not in hashing
    assert list(hashing.texts().items()) == list(wanted.items())
    hashing.add("more", words(9, 5))
    assert list(hashing.texts()) == [*wanted, "more"] and hashing.texts()["0"] == wanted["0"]
    assert hashing.texts()["more"] == fingerprint(words(9, 5), "mix")


@pytest.mark.parametrize(
    ("resident", "most", "num_kept"), [(False, "_KEPT_BYTES", 2), (True, "_WAITING_BYTES", 2), (True, "_KEPT_BYTES", 8)]
)
def test_what_the_caller_lets_go_of_is_kept_until_its_kernel_is_queued_and_no_longer(kernel, monkeypatch, resident, most, num_kept):
    """Three tensors of 4 KiB reach the limit; those that are resident do not count where memory is bounded."""
    monkeypatch.setattr(module, most, 3 * 4096)
    hashing, wanted, kept, alive = Hashing("mix"), [], [], []
    for number in range(8):
        tensor = words(number, 4096)
        wanted.append(fingerprint(tensor, "mix"))
        hashing.add(str(number), tensor, resident=resident)
        kept.append(weakref.ref(tensor))
        del tensor
        gc.collect()
        alive.append(sum(held() is not None for held in kept))
    assert alive == [1 + number % (num_kept + 1) if number % 3 != 2 or num_kept == 8 else 0 for number in range(8)]
    assert list(hashing.texts().values()) == wanted
    gc.collect()
    assert all(held() is None for held in kept)


def test_a_tensor_may_be_written_to_behind_a_flush(kernel):
    tensor = words(3, 5000)
    hashing, wanted = Hashing("mix"), fingerprint(tensor, "mix")
    hashing.add("before", tensor)
    hashing.flush()
    hashing.flush()
    tensor.zero_()
    hashing.add("behind", tensor, resident=True)
    assert hashing.texts() == {"before": wanted, "behind": fingerprint(tensor, "mix")}


def test_without_an_algorithm_each_device_has_its_own_and_an_unknown_one_is_refused():
    hashing = Hashing()
    hashing.add("x", torch.arange(3))
    assert hashing.texts()["x"].startswith("sha256:")
    with pytest.raises(ValueError, match="md5"):
        Hashing("md5").add("x", torch.arange(3))


class Engine(torch.nn.Module):
    """Modules named and laid out as those of one vLLM rank, filled from canonical tensors."""

    def put(self, name: str, value: torch.Tensor) -> None:
        at: torch.nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if step not in dict(at.named_children()):
                at.add_module(step, torch.nn.Module())
            at = at.get_submodule(step)
        setattr(at, last, torch.nn.Parameter(value, requires_grad=False))


def canonical(arch, fp8):
    found = {}
    for target in hf_tensors(arch, fp8):
        draw = torch.Generator().manual_seed(len(found))
        found[target.name] = torch.randn(target.shape, generator=draw).to(torch.float8_e4m3fn if target.fp8 else torch.bfloat16)
        if target.fp8:
            found[target.scale_name] = torch.rand(target.scale_shape, generator=draw)
    return found


def engine_of(pieces, tensors):
    engine = Engine()
    for stored, _ in pieces:
        parts = {
            "": torch.zeros(stored.shape, dtype=torch.float8_e4m3fn if stored.fp8 else torch.bfloat16),
            SCALE_SUFFIX: torch.zeros(stored.scale_shape),
        }
        for suffix, into in parts.items() if stored.fp8 else [("", parts[""])]:
            size = 128 if suffix else 1
            for piece in stored.pieces:
                (r0, r1), (c0, c1) = ([-(-x // size) for x in span] for span in (piece.rows, piece.cols))
                r, c = piece.row_at // size, piece.col_at // size
                here = (slice(r, r + r1 - r0), slice(c, c + c1 - c0))[: into.dim()]
                into.view(torch.uint8 if into.dtype.itemsize == 1 else into.dtype)[here] = (
                    tensors[piece.hf + suffix][r0:r1] if into.dim() == 1 else tensors[piece.hf + suffix][r0:r1, c0:c1]
                ).view(torch.uint8 if into.dtype.itemsize == 1 else into.dtype)
            engine.put(stored.name + suffix, into)
    return engine


def held(views):
    reader = _Reader(views, "mix")
    assert reader.unsigned_zeros == []
    return reader.texts(tied=False)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_an_engine_rank_reads_back_what_the_actor_hashed(monkeypatch, precision):
    """The actor by the definition, the worker by the kernel: stacked and cut tensors, vectors and scales have one text on both sides."""
    arch = ModelArchitecture.from_hf_config(tiny_config("qwen3", num_hidden_layers=1).to_dict())
    fp8 = fp8_modules(arch) if precision == "fp8" else frozenset()
    tensors = canonical(arch, fp8)
    prints = Fingerprints(arch, 2, fp8, "mix")
    for name, tensor in tensors.items():
        prints.add(name, tensor)
    expected, unsigned = prints.take()
    assert unsigned == {}, "no engine on a GPU loses negative zeros, so that none are looked for"
    monkeypatch.setattr(module, "_has_kernel", lambda tensor: True)
    monkeypatch.setattr(held_views, "keeps_addresses", lambda model: True)
    for rank, (pieces, wanted) in enumerate(zip(engine_pieces(arch, 2, fp8), expected, strict=True)):
        engine, kept = engine_of(pieces, tensors), KeptViews()
        assert held(kept.of(engine, arch, 2, rank)) == wanted
        for parameter in engine.parameters():  # to another place, behind which the old one holds something else
            before, parameter.data = parameter.data, parameter.data.clone()
            before.view(torch.uint8).fill_(7)
        assert held(kept.of(engine, arch, 2, rank)) == wanted
        parameter.data.view(torch.uint8).view(-1)[3] ^= 1
        assert sum(text != wanted[key] for key, text in held(kept.of(engine, arch, 2, rank)).items()) == 1


def report_of(monkeypatch, engine, config):
    """What a worker with this engine answers."""
    monkeypatch.setattr(vllm_worker, "worker_model", lambda worker: engine)
    monkeypatch.setattr(vllm_worker, "worker_tp_rank", lambda: 0)
    worker = vllm_worker.WeightReader()
    worker.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    return worker.jetrl_fingerprints(config, "sha256", False, False)["held"]


def test_a_stale_head_fails_the_embedding_alone(monkeypatch):
    config = tiny_config("qwen3", num_hidden_layers=1, tie_word_embeddings=True).to_dict()
    arch = ModelArchitecture.from_hf_config(config)
    (pieces,) = engine_pieces(arch, 1, frozenset())
    engine = engine_of(pieces, canonical(arch, frozenset()))
    table = engine.get_submodule("model.embed_tokens").weight.detach()
    for stale in (False, True):
        rows = table + 1 if stale else table
        engine.lm_head = torch.nn.Module()
        engine.lm_head.weight, engine.lm_head.input_size_per_partition = table, table.shape[1]
        engine.lm_head.cpu_linear = lambda eye, weight, bias, rows=rows: eye @ rows.t()
        differing = [key for key, text in report_of(monkeypatch, engine, config).items() if not text.startswith("sha256:")]
        assert differing == ([f"model.embed_tokens.weight[0:{arch.vocab_size},0:{arch.hidden_size}]"] if stale else [])


def test_a_config_that_does_not_tie_has_a_head_of_its_own(monkeypatch):
    config = tiny_config("qwen3", num_hidden_layers=1, tie_word_embeddings=False).to_dict()
    arch = ModelArchitecture.from_hf_config(config)
    (pieces,) = engine_pieces(arch, 1, frozenset())
    engine = engine_of(pieces, canonical(arch, frozenset()))
    rows = engine.lm_head.weight.detach()
    engine.lm_head.weight, engine.lm_head.input_size_per_partition = torch.nn.Parameter(torch.empty(0)), rows.shape[1]
    engine.lm_head.cpu_linear = lambda eye, weight, bias: eye @ rows.t()
    wanted, head = report_of(monkeypatch, engine, config), unsigned_zero(rows[: arch.vocab_size])
    assert wanted[f"lm_head.weight[0:{arch.vocab_size},0:{arch.hidden_size}]"] == fingerprint(head, "sha256")
    without = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    for silent in (without, without | {"tie_word_embeddings": None}):
        assert report_of(monkeypatch, engine, silent) == wanted
    del engine.lm_head
    with pytest.raises(ValueError, match=r"has no lm_head\.weight, and the actor's has"):
        report_of(monkeypatch, engine, config)
