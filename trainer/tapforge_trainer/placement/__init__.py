"""Where a run computes: what the machine or the cluster has, which settings follow, who gets which GPU, and how an
actor starts and ends."""
