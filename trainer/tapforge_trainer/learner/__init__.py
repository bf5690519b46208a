"""What computes gradients: FSDP2 ranks, packed batches, the head, LoRA, checkpoints, export.

`client.py` is the driver's hold on the ranks, `rank.py` one of them; `families/` is what differs between models. What
engines share with ranks is here as well: patches (`frame_store.py`) and model folders (`families/folder.py`).
"""
