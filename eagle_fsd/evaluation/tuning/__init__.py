"""Find the fastest draft trees for a pair, on the machine it runs on.

A tree decodes tau tokens per step, which takes a certain time. ``prediction.py`` records accepted
lengths with a few large trees, measures a few steps, and ranks all trees by the quotient that it
predicts. ``search.py``, where to start, measures the best of them on the same prompts
(``workload.py``). Three commands ask it: ``tune.py`` for the fastest tree, ``sweep.py`` beside this
package for settings with their trees, ``calibration.py`` for the fastest setting within a bound.
"""
