"""Run the code in answers to programming questions.

Start with ``programs.py``, which builds a test program from an answer. ``sandbox.py`` runs it in a
child process, which ``confined.py`` restricts.
"""
