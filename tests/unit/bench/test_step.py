"""What a record of `bench step` says of the run that it was made in."""

import pytest
import torch

from jetrl_megatron.bench import linear, quant, step


@pytest.fixture
def a_gpu(monkeypatch):
    """The arms are not timed here."""
    monkeypatch.setattr(step, "require_cuda", lambda what: None)
    monkeypatch.setattr(step, "machine", lambda: {"gpu": "none"})


@pytest.mark.parametrize("bench", [quant, linear, step])
def test_without_a_gpu_nothing_is_timed_and_nothing_written(monkeypatch, tmp_path, bench):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(step.parallel_state, "initialize", lambda *args: pytest.fail("it was started"))
    with pytest.raises(ValueError, match=rf"{bench.__name__.split('.')[-1]} times CUDA kernels and torch sees no CUDA device; run it on"):
        bench.main(["--json", str(tmp_path / "x.jsonl")])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("a_gpu")
def test_a_record_names_the_layers_that_ran_and_no_path_of_the_machine(monkeypatch, tmp_path):
    times = ("update_ms", "forward_backward_ms", "optimizer_ms", "quantise_weights_ms", "logprob_forward_ms", "peak_gib")
    monkeypatch.setattr(step, "time_arm", lambda *args: {**dict.fromkeys(times, 1.0), "kernel_ms": {}})
    found = []
    monkeypatch.setattr(step, "write_json", lambda path, records: found.extend(records))
    assert step.main(["--model", "qwen3-14b", "--arms", "bf16", "jetrl", "--json", str(tmp_path / "x.jsonl")]) == 0
    assert step.main(["--model", "qwen3-14b", "--layers", "3", "--arms", "bf16", "--json", str(tmp_path / "x.jsonl")]) == 0
    assert [(record["arm"], record["layers"]) for record in found] == [("bf16", 40), ("jetrl", 40), ("bf16", 3)]
    assert not any(str(tmp_path) in str(record) for record in found)


@pytest.mark.usefixtures("a_gpu")
def test_what_an_arm_measured_is_written_before_the_next_arm_starts(monkeypatch, tmp_path):
    out, begun = tmp_path / "x.jsonl", []

    def time_arm(case, precision, ranks, device):
        begun.append(len(out.read_text().splitlines()))
        return {**dict.fromkeys(("update_ms", "logprob_forward_ms"), 1.0), "kernel_ms": {}}

    monkeypatch.setattr(step, "time_arm", time_arm)
    assert step.main(["--model", "qwen3-14b", "--arms", "bf16", "jetrl", "--json", str(out)]) == 0
    assert begun == [0, 1] and len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("fp16", r"--arms fp16: arm is 'fp16'; it must be one of bf16, fp8_rollout, jetrl"),
        ("jetrl+wgrad_granularity=rows", r"wgrad_granularity is 'rows'; it must be one of groups, blocks"),
        ("jetrl+granularity=blocks", r"'granularity' is no key that can be changed here; there are arm, .*wgrad_granularity"),
        ("jetrl+bf16_layers=0", r"'bf16_layers' is no key that can be changed here"),
    ],
)
def test_an_arm_that_there_is_not_is_refused_by_its_name_before_anything_starts(monkeypatch, arm, message):
    monkeypatch.setattr(step.parallel_state, "initialize", lambda *args: pytest.fail("it was started"))
    with pytest.raises(ValueError, match=message):
        step.main(["--arms", "bf16", arm])
