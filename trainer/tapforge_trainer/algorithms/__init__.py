"""Advantages (numpy) and losses (torch, in `losses` alone) as pure functions on arrays, and the estimators by name."""
