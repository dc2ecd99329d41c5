"""Rollout engines: they draw completions with the actor's weights.

- `engine`: the protocol and the request type. `sampling`: drawing a token; the generator of a request.
- `local`: the embedded engine on the actor's own modules, with `pipeline_forward` for one forward through all stages.
"""
