"""How long an update of a run would take on GPUs, said before any is there: `tapforge plan --speed`.

    cards.py      what a GPU computes and reads in a second, as its maker says
    estimate.py   seconds of learner and rollout, from counted operations. Pure
    balance.py    which split of the GPUs would be faster. Pure
    command.py    from arguments to what is printed

Operations are counted; how much of a GPU's peak they reach is assumed, and said with each figure.
"""
