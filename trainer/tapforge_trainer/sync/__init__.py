"""How weights get from the learner to the engines, through Ray's object store, by NCCL or by CUDA IPC, and the proof
that they are the same there.

`sync.py` is a round of weights, `proof.py` its probe and `received.py` the comparison of bytes; `gpu.py` runs on ranks,
`transfer.py` and `arrivals.py` in vLLM's workers.
"""
