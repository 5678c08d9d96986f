"""MT-bench's grading by a language model behind an OpenAI-compatible endpoint.

Start with ``grading.py``, whose ``judge_answers`` rates single answers, or ``pairwise.py``, whose
``judge_pairs`` compares answers with exact decoding's; both write FastChat's judgment files.
``prompts.py`` fills FastChat's prompts and reads the replies, ``client.py`` asks for the judgments
that a file lacks.
"""
