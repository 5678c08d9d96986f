"""MT-bench's grading by a language model behind an OpenAI-compatible endpoint.

Start with ``judging.py``, whose ``judge`` rates single answers or compares them with a reference's;
``prompts.py`` fills FastChat's prompts and reads the replies.
"""
