"""vLLM engines and their clients.

    pool.py, client.py, wire.py    the driver's hold on all engines, their clients, and the messages between them
    actor.py, mailboxes.py         one engine as a Ray actor, and its answers until they are collected
    sampler.py, vllm.py            vLLM in that process, driven step by step, and its arguments
    preprocessor.py, prompts.py    requests made ready: frames cut into patches, prompts as vLLM takes them
    mask.py, pauses.py, choice.py  what may be sampled, deadlines that stand still, which engine an episode asks

No other room but `sync` imports vLLM.
"""
