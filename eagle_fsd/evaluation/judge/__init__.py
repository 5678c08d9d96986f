"""MT-bench's single-answer grading by a language model behind an OpenAI-compatible endpoint.

Start with ``grading.py``: ``judge_answers`` grades the answers of an evaluation and writes
FastChat's judgment file. ``prompts.py`` fills FastChat's prompts and reads the ratings,
``client.py`` sends the requests, and ``scores.py`` summarizes the judgments of each method.
"""
