"""Phones in a person's hands: a page on which a task is played, judged, and kept as an episode or discarded.

`page.py` is the page over HTTP; behind it is a `phone.PagePhone`: of the simulated phone (`phone/page_phone.py`), or of
any phone that the bridge has (`bridge/page_phone.py`). Episodes are written by an `episode.EpisodeWriter`.
"""
