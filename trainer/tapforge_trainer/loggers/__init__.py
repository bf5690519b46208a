"""Trackers that get a run's figures besides its own folder: TensorBoard, W&B, SwanLab, MLflow, and those of others.

- Their libraries run in a process of their own (`process.py`), which the driver kills when it does not end in time:
  none of them can slow a run down, hang it, or change how it ends. What fails is reported once.
- A figure is logged at most once for each step, over all sessions of a run.
- What is logged of the configuration holds no credentials (`settings_of`).
"""
