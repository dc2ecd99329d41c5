"""Servers made of Python, for the tests of the pool: a client that answers, and a server that starts at once."""

import threading
import time
from pathlib import Path

from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.rollout.published import Expected, Published
from jetrl_megatron.rollout.vllm_client import ServerGone
from jetrl_megatron.rollout.vllm_pool import PoolLimits

LIMITS = PoolLimits(request_timeout_s=1.0, push_timeout_s=1.0, max_restarts=2)


def expected(step):
    return Expected(version=WeightVersion(step, ""), by_rank=({"w[0:1,0:1]": f"weights {step}"},))


def published(step, has_weights=True):
    return Published(step=step, directory=Path(f"v{step}"), has_weights=has_weights, algorithm="sha256", expected=expected(step).at_hand())


class FakeClient:
    """A server's other end; `holds` is what it computes with."""

    def __init__(self, holds):
        self.holds, self.alive, self.paused, self.events, self.keeps_prefixes = holds, True, False, [], False
        self.asked = {}

    def _need_life(self, event):
        self.events.append(event)
        if not self.alive:
            raise ServerGone("connection refused")

    def healthy(self):
        return self.alive

    def pause(self, timeout_s):
        self._need_life("pause")
        self.paused = True

    def resume(self):
        self._need_life("resume")
        self.paused = False

    def wake(self, part, timeout_s):
        self._need_life(f"wake {part}")

    def reset_prefix_cache(self):
        self._need_life("reset")
        if self.keeps_prefixes:
            raise ServerGone("the prefix cache was not reset")

    def rpc(self, method, kwargs, timeout_s):
        self._need_life(method)
        if method == "jetrl_prepare":
            return [{"context_toks": 512}]
        self.asked = kwargs
        return [{"rank": 0, "held": {"w[0:1,0:1]": self.holds}, "unsigned_zeros": [], "changed_buffers": []}]


class FakeServer:
    """Starts at once; holds what lies in the directory it is started on."""

    client_class = FakeClient

    def __init__(self):
        self.pid, self.starts, self.hold_start, self.broken = 1, [], threading.Event(), False
        self.hold_start.set()

    def start(self, directory, with_weights):
        self.starts.append(directory.name)
        self.hold_start.wait(10)
        if self.broken:
            raise RuntimeError("it does not start")
        self.pid = 1
        self.client = self.client_class(directory.name.replace("v", "weights ") if with_weights else "random")
        return self.client

    def stop(self):
        self.pid = 0


def load(client, what):
    client._need_life("load")
    client.holds = f"weights {what.step}"


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
