"""Where the weights live: FSDP2 learner ranks, vLLM engines, weight sync, checkpoints, export. The only room besides
`loop` that knows Ray."""
