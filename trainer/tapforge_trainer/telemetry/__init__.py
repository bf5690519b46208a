"""What a run says of itself: events on disk and a live view, how far it is (`progress.py`, part of each checkpoint),
what it waits for at its start, and where its time goes."""
