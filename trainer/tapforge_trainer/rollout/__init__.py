"""Who plays: which attempts, on which phones, in which order, and what becomes of groups. All but `actor.py` decides
without Ray."""
