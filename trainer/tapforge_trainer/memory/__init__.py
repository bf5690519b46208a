"""How much memory a run takes, before it takes any: `tapforge plan --memory`.

    shape.py     what config.json says about sizes: widths, parameters by part
    known.py     config.json of published models, so that a plan needs no download; GPUs by name
    learner.py   one learner rank, category by category, through a step
    engine.py    one engine GPU: weights, key-value cache, passes
    estimate.py  a TrainingRun -> all GPUs, the host, checkpoints; does it fit
    advice.py    which change of a setting makes it fit
    report.py    the same as JSON and for people
    trace.py     the learner's step on fake tensors: what learner.py is checked against. The only module with torch

All is pure but for reading a model folder and `trace.py`. Sizes are bytes unless a name says otherwise.
"""
