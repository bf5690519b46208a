"""Episodes as data: one format for recordings, data sets and people, what is converted into it, and what reads it."""
