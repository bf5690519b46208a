"""What episodes are worth: streams computed from records (`streams.py`), and those that are asked for after an
episode's end (`rewarder.py`): judges, and rewards of installed packages (`registry.py`)."""
