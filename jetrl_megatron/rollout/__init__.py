"""Rollout engines: they draw completions with the actor's weights.

- `engine`: the protocols and the request type. `background_draw`: a draw beside the update, and when it may push.
- `sampling`: drawing a token; the generator of a request.
- `local`: the embedded engine on the actor's own modules, with `pipeline_forward` for one forward through all stages.

The pool of vLLM servers, from a request to the bytes that answer it:

- `vllm_engine`: the protocol on all ranks; rank 0 speaks for everybody. `vllm_dispatch`: requests over servers, each answered once.
- `vllm_pool`: which server may serve, with which verified weights, and how one that died comes back. `vllm_member`: one server's states and
  its way through a push, a start and a sleep. `vllm_client`: one server over HTTP.
- `vllm_server`: a server's command line, environment and process. `vllm_guard`: no server outlives its run.
- `bucket`: weights in a GPU buffer that two processes see, for CUDA IPC.
- `vllm_auth`: the key at a server's door.
- `published`, `fingerprint`: what an engine must hold and where, and how two tensors are compared (`triton_fingerprint`: on a GPU, in one
  pass over all of them, for which `tiles` cuts them up).
  `vllm_worker`: reads it back inside the engine. `vllm_verify`: compares. `laps`: seconds of the parts of a push.
- `vllm_plugin`: the actor's norm, and on a CPU its FP8 linear, inside vLLM. `vllm_transfer`: a receiver for vLLM's NCCL route, which writes
  weights where the parameters hold them (`vllm_in_place`). `held_views`: where that is, kept between pushes.
- `compat`: what this project knows of vLLM's inside, and every difference between its versions.
  `compat_weights`: how its layers hold weights.
"""
