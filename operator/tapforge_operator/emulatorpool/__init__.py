"""Pools: what to create, to delete and to report. Everything here is a pure function."""
