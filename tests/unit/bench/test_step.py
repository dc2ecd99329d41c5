"""What a record of `bench step` says of the run that it was made in."""

from jetrl_megatron.bench import step


def test_a_record_names_the_layers_that_ran_and_no_path_of_the_machine(monkeypatch, tmp_path):
    times = ("update_ms", "forward_backward_ms", "optimizer_ms", "quantise_weights_ms", "logprob_forward_ms", "peak_gib")
    monkeypatch.setattr(step, "time_arm", lambda *args: {**dict.fromkeys(times, 1.0), "kernel_ms": {}})
    found = []
    monkeypatch.setattr(step, "write_json", lambda path, records: found.extend(records))
    assert step.main(["--model", "qwen3-14b", "--arms", "bf16", "jetrl", "--json", str(tmp_path / "x.jsonl")]) == 0
    assert step.main(["--model", "qwen3-14b", "--layers", "3", "--arms", "bf16", "--json", str(tmp_path / "x.jsonl")]) == 0
    assert [(record["arm"], record["layers"]) for record in found] == [("bf16", 40), ("jetrl", 40), ("bf16", 3)]
    assert not any(str(tmp_path) in str(record) for record in found)
