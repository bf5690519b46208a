"""A run on a cluster: the environment of its Pod, where its files are, and what driver and operator exchange."""
