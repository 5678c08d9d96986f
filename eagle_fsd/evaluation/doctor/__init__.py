"""Explain a low tau: measure how a drafter agrees with its target, and test possible causes.

Start with ``diagnosis.py``. ``measurements.py`` decodes questions and lets the drafter predict the
answers. ``checks.py`` looks for causes by changing one thing at a time: the drafter's settings
(``variants.py``) or the chat template (``templates.py``).
"""
