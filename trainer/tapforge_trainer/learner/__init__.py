"""Who computes gradients: a rank, FSDP2, packed batches, heads, LoRA, checkpoints, export. `client.py` is what the
run has of it; `families/` is what differs between models."""
