"""Question sets: published ones, such as MT-bench and GSM8K, bundled problems, and users' own.

Start with ``sets.py``, which finds a set by its name and downloads it if necessary. ``formats.py``
reads the formats of files; every row becomes the ``Question`` that ``question.py`` defines.
"""
