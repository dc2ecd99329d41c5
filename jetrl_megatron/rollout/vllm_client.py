"""One engine server over HTTP: token ids in, token ids with their log-probs out; and the few control calls of a weight push.

Enters: an address and the run's key. Leaves: `Drawn` for a completion, plain values for control calls. Text is never sent, read nor made:
completions go through vLLM's route for token ids, where the server leaves its detokenizer out. Every sampling field is set, so that
nothing of the model directory's generation_config can slip in; log-probs are those of the distribution that was sampled from, since the
server runs with `--logprobs-mode processed_logprobs`.

Failures are of two kinds: `ServerGone`, after which the same request may be sent to another server, and ValueError, after which it may not.
"""

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from jetrl_megatron.contracts import FinishReason, SamplingParams
from jetrl_megatron.rollout.vllm_auth import KEY_VARIABLE

GENERATE = "/inference/v1/generate"
_FINAL_ONLY = 2
"""vLLM's RequestOutputKind: nothing is put together before a completion has ended."""
_NO_LOGPROB = -9999.0
"""What vLLM writes where it has none; no token that is sampled in FP32 comes near it."""


class ServerGone(Exception):
    """The server did not answer, broke off, or failed inside; the request has no result."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One completion as the server gives it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, nats, under the distribution that it was drawn from."""
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class EngineClient:
    """Address and key of one server; every call opens a connection of its own, so any thread may call."""

    url: str
    """`http://host:port`."""
    key: str
    fields: Mapping[str, Any]
    """Sampling fields of the server's version (compat.request_fields)."""

    def __repr__(self) -> str:
        """Name the address only: the key stays out of logs and tracebacks."""
        return f"EngineClient({self.url})"

    def complete(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, timeout_s: float) -> Drawn:
        """Draw one completion.

        seed: of this request alone, below 2^63. timeout_s: for the whole answer; the server gives the request up when we hang up.
        Raises ServerGone, or ValueError where the server refuses the request or ends the completion where the run would not.
        """
        drawn = parse_completion(self._call("POST", GENERATE, self._body(prompt_ids, params, seed), timeout_s))
        stopped, num = drawn.finish_reason == "stop", len(drawn.token_ids)
        if num > params.max_new_toks:
            raise ValueError(f"{self.url} gave {num} tokens where {params.max_new_toks} were asked for")
        if stopped and drawn.token_ids[-1] not in params.stop_token_ids:
            raise ValueError(f"{self.url} ended a completion with token {drawn.token_ids[-1]}, no stop token of {params.stop_token_ids}")
        if not stopped and num != params.max_new_toks:
            raise ValueError(
                f"{self.url} cut a completion off after {num} of {params.max_new_toks} tokens, behind a prompt of {len(prompt_ids)}: its "
                "context is shorter than the model's; start it with a --max-model-len that holds both"
            )
        return drawn

    def _body(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> dict[str, Any]:
        sampling = {
            "max_tokens": params.max_new_toks,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # only the ids above end a completion
            "min_tokens": 0,
            "detokenize": False,
            "output_kind": _FINAL_ONLY,
            **self.fields,
        }
        return {"token_ids": list(prompt_ids), "sampling_params": sampling}

    def healthy(self, timeout_s: float = 20.0) -> bool:
        """Ask whether the server and its engine live; one that refuses the question is somebody else's, and no server of the run."""
        try:
            self._call("GET", "/health", None, timeout_s)
        except (ServerGone, ValueError):
            return False
        return True

    def pause(self, timeout_s: float) -> None:
        """Let running requests end and admit no more until `resume`; no memory is released.

        Their answers may still be on their way when it returns. vLLM's `/pause` sleeps 20 ms for those, behind the same call of the
        scheduler, with which it also empties caches: here that is left to `reset_prefix_cache`.
        """
        self._call("POST", "/sleep?" + urlencode({"level": 0, "mode": "wait"}), None, timeout_s)

    def resume(self, timeout_s: float = 30.0) -> None:
        """Admit requests again; a server that sleeps stays as it is."""
        self._call("POST", "/wake_up?" + urlencode({"tags": "scheduling"}), None, timeout_s)

    def sleep(self, timeout_s: float) -> None:
        """Give up requests that nobody waits for, admit no more, and release weights and KV cache (see compat.device_arguments)."""
        self._call("POST", "/sleep?" + urlencode({"level": 2, "mode": "abort"}), None, timeout_s)

    def wake(self, part: Literal["weights", "kv_cache"] | None, timeout_s: float) -> None:
        """Take the memory of one part again, without content: the weights must be loaded before anything is computed.

        part: None takes whatever a server released, nothing if it is awake, and admits requests.
        """
        self._call("POST", "/wake_up" + ("" if part is None else "?" + urlencode({"tags": part})), None, timeout_s)

    def reset_prefix_cache(self, timeout_s: float = 30.0) -> None:
        """Forget every cached prefix, also what a KV connector keeps outside; raises ServerGone where the server says that it could not."""
        answer = self._call("POST", "/reset_prefix_cache?" + urlencode({"reset_external": "true"}), None, timeout_s)
        if answer.get("success") is not True:
            raise ServerGone(f"{self.url}: the prefix cache was not reset: {answer}")

    def rpc(self, method: str, kwargs: Mapping[str, Any], timeout_s: float) -> list[Any]:
        """Call a method of every worker; returns their results."""
        answer = self._call("POST", "/collective_rpc", {"method": method, "kwargs": dict(kwargs), "timeout": timeout_s}, timeout_s)
        results = answer.get("results")
        if not isinstance(results, list):
            raise ServerGone(f"{self.url}: {method} was answered without results: {str(answer)[:200]}")
        return results

    def control(self, route: str, body: Mapping[str, Any] | None, timeout_s: float) -> None:
        """Post to a weight-update route, for example `/start_weight_update`."""
        self._call("POST", route, body, timeout_s)

    def _call(self, verb: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, self.url
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request(verb, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status >= 500:
            raise ServerGone(f"{self.url}{path} answered {response.status}: {text[:300]!r}")
        if response.status != 200:
            raise ValueError(f"{self.url}{path} answered {response.status}: {text[:300]!r}{_way_out(response.status, path)}")
        if not text:
            return {}
        try:
            answer = json.loads(text)
        except json.JSONDecodeError as error:
            raise ServerGone(f"{self.url}{path} answered something that is not JSON: {text[:100]!r}") from error
        if not isinstance(answer, dict):
            raise ServerGone(f"{self.url}{path} answered something that is no JSON object: {text[:100]!r}")
        return answer


def _way_out(status: int, path: str) -> str:
    """Say what a server that somebody else started lacks, by what it refused; empty where the refusal says it."""
    if status == 401:
        return f"; the server has another key than {KEY_VARIABLE} holds here: start both with one"
    if status == 404:
        lacking = "--tokens-only" if path == GENERATE else "VLLM_SERVER_DEV_MODE=1 in its environment"
        return f"; the server was started without this route: start it with {lacking}"
    return ""


def parse_completion(answer: Mapping[str, Any]) -> Drawn:
    """Read the answer of `/inference/v1/generate`.

    Raises ServerGone where ids and log-probs do not keep step or the completion was aborted: never a completion that was patched up.
    """
    try:
        return _parsed(answer)
    except (AttributeError, TypeError) as error:
        raise ServerGone(f"the server answered something that is no completion ({error}): {str(answer)[:200]}") from error


def _parsed(answer: Mapping[str, Any]) -> Drawn:
    choices = answer.get("choices") or []
    if len(choices) != 1:
        raise ServerGone(f"the server answered with {len(choices)} completions: {str(answer)[:200]}")
    choice = choices[0]
    ids, found = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
    logprobs = [v for entry in found if (v := entry.get("logprob")) is not None and _NO_LOGPROB < v <= 0.0]
    named = [entry.get("token") for entry in found]
    reason = choice.get("finish_reason")
    if not ids or len(logprobs) != len(ids):
        raise ServerGone(
            f"the server gave {len(ids)} token ids and {len(logprobs)} log-probs in ({_NO_LOGPROB:g}, 0] (finish reason {reason!r})"
        )
    if any(type(i) is not int or i < 0 for i in ids):
        raise ServerGone(f"the server gave token ids that are none: {ids[:4]}...")
    if named != [f"token_id:{i}" for i in ids]:
        raise ServerGone(f"the server's log-probs are of other tokens than those that it gave: {named[:4]}... and {ids[:4]}...")
    if reason not in ("stop", "length"):
        raise ServerGone(f"the server ended a completion with {reason!r}")
    return Drawn(token_ids=tuple(ids), logprobs=tuple(map(float, logprobs)), finish_reason=reason)
