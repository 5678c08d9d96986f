"""Explain a low tau: measure how a drafter agrees with its target, and test possible causes.

Start with ``diagnosis.py``. ``measurements.py`` decodes questions, and ``agreement.py`` lets the
drafter predict the answers, as it is and with one change. ``checks.py`` looks for causes in both,
``templates.py`` has the chat templates that it tries.
"""
