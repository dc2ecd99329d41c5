"""The precision flow as it runs: every operator of the rollout engine against the actor's, on the same inputs.

    prompts -> vLLM in a process of its own --(outputs of every operator)--> the actor, which is fed them -> table

`engine_taps` records a real vLLM engine's operators, `actor_taps` compares the actor's, `command` runs both and prints what differs.
A change to what a layer computes belongs in actor/; a change to how an engine is started in rollout/compat.py.
"""
