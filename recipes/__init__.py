"""Train and measure the drafters in the package and the bundled target, and compare them.

``bundled.py`` trains the bundled pair: the target (``target.py``) and, on generated chats, its
draft heads and its draft model (``draft_model.py``). ``smollm2.py`` trains the heads of SmolLM2, on
chats that share no question with a benchmark (``overlap.py``), ``stories.py`` a head for a model of
short stories. ``compare_losses.py`` and ``compare_heads.py`` compare losses and heads. They share
``measure.py``, which runs ``eagle-fsd evaluate``, and ``publish.py``, which saves heads and writes
their cards.
"""
