"""What an engine server computes with against what the actor published: the check that every server passes before it serves.

Enters: a live server, `Published`. Leaves: nothing, or WeightMismatch naming tensors. Every rectangle of every canonical tensor is
compared, on every rank; after a sleep the buffers too (rope tables), which no checkpoint holds and the server itself must have kept.
One call of the server does all of it. The server hashes while the actor may
still be at it: what is expected is waited for behind that call.
"""

from typing import Any

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.published import Published, differences, summary
from jetrl_megatron.rollout.vllm_client import EngineClient


class WeightMismatch(RunFailure):
    """An engine does not hold what the actor published."""


def verify_weights(
    server: str, client: EngineClient, published: Published, config: dict[str, Any], timeout_s: float, *, refresh: bool, slept: bool
) -> None:
    """Compare what every rank computes with, tensor by tensor.

    server: its name in errors. config: the engines' config.json. refresh, slept: see `WeightReader.jetrl_fingerprints`. Raises
    WeightMismatch naming tensors, or the buffers of a server that slept; RunFailure where the actor did not send all of them.
    """
    asked = {"config": config, "algorithm": published.algorithm, "refresh": refresh, "slept": slept}
    reports = client.rpc("jetrl_fingerprints", asked, timeout_s)
    expected = published.expected.result()
    ranks = sorted(report["rank"] for report in reports)
    if ranks != list(range(len(expected.by_rank))):
        raise WeightMismatch(f"{server} has ranks {ranks}, expected {len(expected.by_rank)} of them")
    lines = [
        f"rank {report['rank']}: {line}"
        for report in reports
        for line in differences(expected, report["rank"], report["held"], report["unsigned_zeros"])
    ]
    if lines:
        raise WeightMismatch(f"{server} does not hold version {published.step}: {summary(lines)}")
    lines = [f"rank {report['rank']}: buffer {name} differs" for report in reports for name in report["changed_buffers"]]
    if lines:
        raise WeightMismatch(f"{server} did not wake as it went to sleep: {summary(lines)}")
