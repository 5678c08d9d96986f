"""Search for the draft trees and acceptance settings with which a pair is fast on this machine.

The speed of a tree is tau, the tokens per step, divided by the seconds per step. ``prediction.py``
records accepted lengths with a few trees, times a few steps, and ranks many trees by predicted
speed. ``search.py``, where to start, measures the best of them on prompts (``workload.py``). Three
modules beside this package use it: ``sweep.py`` for the trees of the settings that it measures,
``tune.py`` for the fastest tree, and ``calibration.py`` for the fastest setting within a bound.
"""
