"""Tiny HF directories, written once."""

import pytest

from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory):
    """Two layers of Qwen3's kind, head_dim 128."""
    return write_tiny_model(tmp_path_factory.mktemp("qwen3") / "hf", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="session")
def one_layer_dir(tmp_path_factory):
    """The same with one layer, for tests that build many actors."""
    return write_tiny_model(tmp_path_factory.mktemp("one_layer") / "hf", "qwen3", num_hidden_layers=1)
