"""Run the code in answers to programming questions.

Start with ``programs.py``, which extracts the code of an answer. ``execution.py`` runs it and its
tests in two processes (``child.py``), each in a sandbox (``sandbox.py``, ``seccomp.py``).
"""
