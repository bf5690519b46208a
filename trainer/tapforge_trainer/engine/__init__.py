"""vLLM engines and who asks them: an engine as a Ray actor, all engines of a run, the client with its wire, and what
is put into vLLM (frames, tokens that may be sampled, prompts)."""
