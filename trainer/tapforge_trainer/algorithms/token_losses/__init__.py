"""Losses of tokens, one idea a file: options, formula and source. `algorithms/loss_registry.py` has their names."""
