"""Rewards that are not the environment's own: none yet. A step's reward is what the phone answered, and an episode's
outcome becomes one in `batch.py` (`reward_streams`)."""
