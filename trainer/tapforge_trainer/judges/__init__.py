"""Judges: models behind endpoints that say from screens whether a task was done, or whether a step helped.

Promises:
1. No verdict is made up. An answer that can't be read is a vote without a value, and where the votes don't decide there
   is no verdict but a `VerdictMissing`, which says why.
2. What a screen, a goal or a typed text says reaches the model as data and never counts as its answer.
3. Every wait ends, every answer is bounded, and no key is in a record, a log or an error.
4. A verdict that the journal has is not asked for again.
"""
