"""How weights get from the learner to the engines, through Ray's object store, by NCCL or by CUDA IPC, and the proof
that they are the same there.

`sync.py` is a round of weights and `proof.py` its probe; `gpu.py` runs on ranks, `transfer.py` in vLLM's CPU workers.
"""
