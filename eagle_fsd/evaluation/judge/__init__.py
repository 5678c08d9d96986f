"""MT-bench's grading by a language model behind an OpenAI-compatible endpoint.

Start with ``judging.py``, whose ``judge_answers`` rates single answers and whose ``judge_pairs``
compares answers with a reference's; ``prompts.py`` fills FastChat's prompts and reads the replies.
"""
