"""Tasks that are made by playing forward: a walk of the phone's own operations, the difference that it made, a sentence
for it.

`operations` what a walk is made of · `words` the sentence · `walk` a task from a walk · `trials` by what a task is
tried before it is taken. How such a task says its check is in `own_check` beside this package.
"""
