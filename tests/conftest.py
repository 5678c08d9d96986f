"""Hypothesis profiles for all property tests.

``repeatable`` (default) draws the same examples on every run, so a failure is never chance;
``pytest --hypothesis-profile explore`` looks further, at random.
"""

from __future__ import annotations

from hypothesis import settings

# No deadline: a first call into torch, or a busy machine, is not a failure.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")
