"""The way to the API server: raw calls with plain dicts, what its watches say, and leader election."""
