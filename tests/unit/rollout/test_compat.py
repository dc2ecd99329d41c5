"""What is asked of an engine before it starts: the actor's operators by name, and the package that vLLM finds them in."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from jetrl_megatron.rollout import compat
from jetrl_megatron.rollout.vllm_plugin import SWITCH


@pytest.mark.parametrize("on_cuda", [False, True])
def test_an_engine_has_no_norm_but_the_actors(on_cuda):
    """A second name in the list would be a fallback to other numerics."""
    assert compat.engine_numerics(on_cuda, 128)["ir_op_priority"] == {"rms_norm": ["jetrl"], "fused_add_rms_norm": ["jetrl"]}
    assert compat.engine_environment(on_cuda, False)[SWITCH] == "1"


@pytest.mark.parametrize(
    ("seqs", "sizes"),
    [(1, [1]), (8, [1, 8]), (128, [1, 32, 128]), (300, [1, 32, 128, 256, 300]), (3000, [1, 32, 128, 256, 384, 512, 1024, 2048, 3000])],
)
def test_a_full_server_decodes_by_a_graph(seqs, sizes):
    assert compat.capture_sizes(seqs) == sizes
    asked = compat.engine_numerics(True, seqs)["compilation_config"]
    assert (
        asked["cudagraph_capture_sizes"] == sizes and "cudagraph_capture_sizes" not in compat.engine_numerics(True, 0)["compilation_config"]
    )


def test_actor_and_servers_compile_into_one_folder_unless_the_user_names_another(monkeypatch):
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert compat.engine_environment(True, False)["DG_JIT_CACHE_DIR"] == "/home/me/.deep_gemm"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/scratch/kernels")
    assert compat.engine_environment(True, False)["DG_JIT_CACHE_DIR"] == "/scratch/kernels"


def test_an_environment_without_the_installed_package_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.30")
    monkeypatch.setattr(compat, "entry_points", lambda **_: ())
    with pytest.raises(ValueError, match=r"jetrl-megatron, which is not installed: pip install -e \."):
        compat.check_engine()
    monkeypatch.undo()
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.30")
    assert compat.check_engine() == "0.30", "the entry point of this very package is found"


def test_the_plugin_does_nothing_in_an_engine_of_somebody_else():
    code = "import sys\nfrom jetrl_megatron.rollout.vllm_plugin import register\nregister()\nassert 'vllm' not in sys.modules\n"
    environment = {k: v for k, v in os.environ.items() if k != SWITCH}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("on_cuda", [False, True])
def test_an_engine_with_other_numerics_is_named_option_by_option(on_cuda):
    like = SimpleNamespace(logprobs_mode="processed_logprobs", dtype=torch.bfloat16, head_dtype=torch.float32)
    assert compat.unlike_numerics(like, on_cuda) == []
    unlike = SimpleNamespace(logprobs_mode="raw_logprobs", dtype=torch.float16, head_dtype=torch.bfloat16)
    named = ["--logprobs-mode is raw_logprobs and must be processed_logprobs", "--dtype is float16 and must be bfloat16"]
    head = ["--hf-overrides head_dtype is bfloat16 and must be float32"] if on_cuda else []
    assert compat.unlike_numerics(unlike, on_cuda) == named + head
