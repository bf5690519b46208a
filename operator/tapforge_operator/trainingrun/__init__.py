"""Decides about TrainingRuns: what their objects are, when an attempt begins and ends, what the status says. Pure."""
