"""Where a run computes: what the machine or the cluster has, who gets which GPU, what engines and ranks are told
(`settings.py`), and what their starts and failures say in words (`start_stage.py`, `actors.py`)."""
