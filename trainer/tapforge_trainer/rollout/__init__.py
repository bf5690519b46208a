"""Rollouts: which attempts, on which phones, in which order, and what becomes of groups. Only `actor.py` knows Ray."""
