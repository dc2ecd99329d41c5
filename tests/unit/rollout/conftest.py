"""Tiny HF directories and one actor for the tests that only read it, and a pool of two servers made of Python."""

import pytest

from jetrl_megatron.rollout.vllm_pool import ServerPool
from tests.tiny_models import write_tiny_model
from tests.unit.rollout.drawing import actor_of
from tests.unit.rollout.fake_servers import LIMITS, FakeServer


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory):
    """Two layers of Qwen3's kind, head_dim 128."""
    return write_tiny_model(tmp_path_factory.mktemp("qwen3") / "hf", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def actor(qwen3_dir):
    """An actor in the `jetrl` arm, shared by a module's tests: none of them may change its weights."""
    with actor_of(qwen3_dir) as built:
        yield built


@pytest.fixture
def pool():
    """Two servers that nobody has started."""
    made = ServerPool([FakeServer(), FakeServer()], [], {}, LIMITS)
    made.servers = [m.server for m in made._members]
    return made
