"""Everything around the loop that must survive a kill: where a run writes, what it saves, how it stops and what it reports.

In data-flow order: `early_stop` ends a command that has started nothing yet; `local_launch` starts one process a rank on this machine;
`run_dir` opens or reopens the run directory and writes the resolved recipe and the environment; `store` keeps checkpoints that are either
complete or invisible, which the `manifest` of each tells; `signals` turns SIGTERM into a stop that all ranks agree on; `phases` times the
parts of a step; `records` appends one line a step; `report` makes the closing table, the curves and `summary.json`.

Nothing here computes a number of the training, and nothing here imports torch before it is used.
"""
