"""Warnings that say nothing about a run stay out of standard error; any other one is shown."""

import tomllib
import warnings
from pathlib import Path

import pytest

from jetrl_megatron import cli
from jetrl_megatron.expected_warnings import EXPECTED, ignore_expected_warnings

OPTIONS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
SEEN = [
    ("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", UserWarning),
    ("Transformer Engine and Apex are not installed. Falling back to local implementations of multi_tensor_applier", UserWarning),
    ("Apex is not installed. Falling back to Torch Norm", UserWarning),
    ("full scope is deprecated. Use empty cuda_graph_scope to capture the whole layer.", UserWarning),
    ("MLP requires ffn_hidden_size, but it was not provided. Using config.ffn_hidden_size by default.", DeprecationWarning),
    ("`torch.distributed.all_gather_into_tensor` is deprecated. Please use `torch.distributed.all_gather_single` instead.", FutureWarning),
    ("`torch.distributed.reduce_scatter_tensor` is deprecated. Please use another instead.", FutureWarning),
]
OTHERS = [
    ("Transformer Engine is not installed", UserWarning),
    ("Apex is not installed. Falling back to Torch Norm", RuntimeWarning),
    ("loss is NaN; full scope is deprecated", UserWarning),
    ("`torch.distributed.all_reduce` is deprecated.", FutureWarning),
]


def shown(message: str, category: type[Warning]) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        ignore_expected_warnings()
        warnings.warn(message, category, stacklevel=1)
    return [str(w.message) for w in caught] == [message]


@pytest.mark.parametrize(("message", "category"), SEEN)
def test_expected_warnings_are_silent(message, category):
    assert not shown(message, category)


@pytest.mark.parametrize(("message", "category"), OTHERS)
def test_all_others_are_shown(message, category):
    assert shown(message, category)


def test_every_command_installs_the_filters_and_pytest_has_the_same(capsys):
    with warnings.catch_warnings():
        warnings.resetwarnings()
        assert cli.main(["train", "nowhere.yaml"]) == cli.EXIT_USAGE
        installed = {(regex.pattern, category) for action, regex, category, _, _ in warnings.filters if regex and action == "ignore"}
    assert set(EXPECTED) <= installed
    assert OPTIONS["filterwarnings"] == [f"ignore:{message}:{category.__name__}" for message, category in EXPECTED]
