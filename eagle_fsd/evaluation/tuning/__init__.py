"""Find the fastest draft trees for a pair, on the machine it runs on.

A tree decodes tau tokens per step, which takes a certain time. ``costs.py`` measures a few steps
and predicts the time of any tree; ``lengths.py`` records accepted lengths with a few large trees
and predicts tau; ``candidates.py`` ranks all trees by the quotient. ``race.py`` measures the best
of them on the same prompts (``workload.py``), dropping the slower half after each round.

Start with ``search.py``, which combines these steps. Three commands build on it: ``tune.py`` finds
the fastest tree, ``sweep.py`` beside this package measures settings with their trees, and
``calibration.py`` finds the fastest setting within a bound on the loss.
"""
