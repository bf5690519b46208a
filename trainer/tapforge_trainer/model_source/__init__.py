"""The model that a run begins with, `spec.model.source`: pinned by the driver, and found or fetched by each node.

Rules:
1. The driver pins what a run begins with (`pin`): a revision of Hugging Face's becomes a commit, a folder of object
   storage the list of its files with their ETags. Every node, and every later session of the run, has the same bytes.
2. A path of one node is never handed to another one: what travels is a `ModelRef`, which each process resolves by
   itself (`resolve`). One process of a node fetches, the others wait for it; where the cache is a volume that nodes
   share, one process of all of them.
3. Processes that only describe the model (driver, rollout workers) fetch no weights.
4. A folder is returned when it is complete: no shard is missing or cut short, and its weights fit its config.json. One
   whose weights are quantized is refused by name, by its texts before any weights are fetched.
5. What is there already costs no call over the network.

`ref.py`: the record and its errors; `folder.py`: what is wrong with a folder; `quantization.py`: whether its weights
are quantized; `hub.py`, `storage.py`: where models come from; `resolve.py`: pin and resolve. No torch, no Ray. Sizes
are bytes, times seconds.
"""
