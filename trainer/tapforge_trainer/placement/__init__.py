"""Where a run computes: what the machine or the cluster has, what gets which GPU, the settings of engines and
ranks (`settings.py`), and what their starts and failures say in words (`start_stage.py`, `actors.py`)."""
