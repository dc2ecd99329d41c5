"""`jetrl bench rollout --servers-only` with real servers: weights that they draw themselves, both arms, no actor."""

import json

import pytest

from jetrl_megatron.bench import rollout

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
SMALL = ["rollout.vllm.kv_cache_gib=0.25", "rollout.vllm.max_num_seqs=8"]
LOAD = ["--prompts", "8", "--prompt-toks", "400", "--new-toks", "6", "--rounds", "2", "--warm-up-rounds", "1"]
"""More tokens at once than vLLM computes in one step, 2048: a prompt that was computed in pieces would end a CPU's engine."""


@pytest.mark.dist
def test_both_arms_are_measured_on_servers_that_drew_their_weights(tmp_path, capfd):
    out = tmp_path / "out.jsonl"
    code = rollout.main([TINY, "parallel.tp=1", "rollout.engine=vllm_colocated", *SMALL, *LOAD, "--servers-only", "--json", str(out)])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["arm"], r["fp8_linears"]) for r in records] == [("jetrl", 14), ("bf16", 0)]
    for record in records:
        assert (record["weights"], record["actors"], record["servers"], record["transport"]) == ("random, no actor", 0, 1, "none")
        assert len(record["rounds_s"]) == 3 and 0.0 < record["toks_a_s_min"] <= record["toks_a_s"] <= record["toks_a_s_max"]
        assert (record["prompts"], record["prompt_toks"], record["new_toks"], record["layers"]) == (8, 400, 6, 2)
    assert printed.err.count("starting 1 servers without an actor") == 2 and "random, no actor" in printed.out
