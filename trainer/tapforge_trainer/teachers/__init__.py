"""Models behind endpoints that play a run's tasks, so that another model can imitate them."""
