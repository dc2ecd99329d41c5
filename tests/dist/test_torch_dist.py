"""Distributed checkpoints of Megatron-core on two processes, tensor parallel in both kinds and pipeline parallel, in and out."""

import pytest

from conversion.convert import Target, convert
from jetrl_megatron.config import ParallelConfig
from tests.dist.ranks import run_ranks
from tests.dist.torch_dist_run import case_of, run_cases
from tests.tiny_models import write_tiny_model
from tests.unit.conversion.directories import as_bytes

pytestmark = pytest.mark.dist

LAYOUTS = {
    "tp2 k_complete": (ParallelConfig(tp=2, micro_batch_toks=1024), "k_complete"),
    "tp2 k_split": (ParallelConfig(tp=2, micro_batch_toks=1024), "k_split"),
    "pp2": (ParallelConfig(pp=2, micro_batch_toks=1024), "k_complete"),
    "pp2 vpp2": (ParallelConfig(pp=2, vpp=2, micro_batch_toks=1024), "k_complete"),
}


def test_saved_by_two_ranks_and_loaded_into_two_ranks(tmp_path):
    # Tied and untied, qkv bias, qk-norm; 203 vocabulary rows, which every layout pads to 256.
    sources = {family: write_tiny_model(tmp_path / family, family) for family in ("llama", "qwen2", "qwen3")}
    cases = []
    for family, source in sources.items():
        convert(source, tmp_path / f"{family}-dist", Target(kind="torch_dist"))
        for name, (parallel, row_parallel) in LAYOUTS.items():
            cases.append(case_of(source, parallel, row_parallel, tmp_path / "saved" / family / name, tmp_path / f"{family}-dist"))
    for wrong in run_ranks(run_cases, 2, cases):
        assert wrong == [[]] * len(cases)
    for family, source in sources.items():
        for name in LAYOUTS:
            out = tmp_path / "out" / family / name
            out.parent.mkdir(parents=True, exist_ok=True)
            convert(tmp_path / "saved" / family / name, out, Target(kind="hf"), hf_config=source)
            assert as_bytes(out) == as_bytes(source), (family, name)
