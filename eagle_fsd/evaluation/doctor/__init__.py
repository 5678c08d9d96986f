"""Explain a low tau: measure how a drafter agrees with its target, and test possible causes.

Start with ``diagnosis.py``. ``measurements.py`` decodes questions, ``agreement.py`` compares the
drafter's distributions with the target's, as it is and with one change. ``settings.py`` lists the
changes, ``templates.py`` the chat templates to try, and ``checks.py`` looks for causes.
"""
