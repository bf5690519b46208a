"""A run on a cluster: what its Pod tells the driver, where its files are, and what the operator is told and says."""
