"""Runs in a browser, while they run and afterwards: an index of episodes, a JSON API that only reads, and the page."""
