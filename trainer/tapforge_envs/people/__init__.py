"""Phones in a person's hands: a page on which a task is played, judged, and kept as an episode or discarded.

`page.py` is the page over HTTP; what stands behind it is a `seat.Seat`: of the simulated phone (`phone/seat.py`) or of
any phone that the bridge has (`bridge/seat.py`). Who writes episodes down is a `played.Keeper`.
"""
