"""Search draft trees and acceptance settings that are fast for a pair, on the machine it runs on.

A tree decodes tau tokens per step, which takes a certain time. ``prediction.py`` records accepted
lengths with a few large trees, measures a few steps, and ranks all trees by the quotient that it
predicts. ``search.py``, where to start, measures the best of them on the same prompts
(``workload.py``). Three commands use it, in modules beside this package: ``sweep.py``
for the trees of the settings that it measures, ``tune.py`` for the fastest tree, and
``calibration.py`` for the fastest setting within a bound.
"""
