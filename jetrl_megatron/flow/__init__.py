"""The precision flow as it runs: every operator of the rollout engine measured against the actor's, on the same inputs.

    prompts -> vLLM in a process of its own --(outputs of every operator)--> the actor, which is fed them -> table

It measures what runs instead of comparing two descriptions, so nothing has to be declared for an operator and nothing can be declared
wrongly. `operators` names what is compared, `engine_taps` records a real vLLM engine, `actor_taps` compares the actor, `command` runs both
and prints. What a layer computes is changed in actor/; how an engine is started, and where its operators are, in rollout/compat.py.
"""
