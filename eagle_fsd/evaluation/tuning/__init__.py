"""Find the fastest draft trees for a pair, on the machine it runs on.

A tree decodes tau tokens per step, which takes a certain time. ``prediction.py`` records accepted
lengths with a few large trees, measures a few steps, and ranks all trees by the quotient that it
predicts. ``search.py`` measures the best of them on the same prompts (``workload.py``).

Start with ``search.py``, which combines both. Three commands build on it: ``tune.py`` finds
the fastest tree, ``sweep.py`` beside this package measures settings with their trees, and
``calibration.py`` finds the fastest setting within a bound on the loss.
"""
