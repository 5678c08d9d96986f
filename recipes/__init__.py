"""Train, measure and compare drafters and their targets, most of which are in the package.

``bundled.py`` trains the bundled pair: the target (``target.py``) and, on generated chats, its
draft heads and its draft model (``draft_model.py``). ``smollm2.py`` trains the heads of SmolLM2, on
chats that share no question with a benchmark (``overlap.py``). ``stories.py`` trains a head for a
model of short stories. Shared code is in ``measure.py``, which runs ``eagle-fsd evaluate``, and in
``publish.py``, which trains and saves heads and writes their cards.
"""
