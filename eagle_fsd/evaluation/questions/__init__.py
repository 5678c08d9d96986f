"""Question sets: MT-bench, Spec-Bench, GSM8K, CommonsenseQA, MMLU, HumanEval, bundled problems.

Start with ``sets.py``, which finds a set by its name and downloads it if necessary. ``formats.py``
reads the published file formats; every row becomes the ``Question`` that ``question.py`` defines.
"""
