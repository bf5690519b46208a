"""How weights get from the learner to the engines, by files, NCCL or IPC, and the proof that they are the same
there."""
