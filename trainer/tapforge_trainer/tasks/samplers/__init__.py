"""Which tasks are practised more often than others, by name; a file for each sampler."""
