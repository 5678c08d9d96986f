"""Train and measure the bundled drafters and their target, and compare them.

Start with ``bundled.py``, which trains and measures everything: the target (``target.py``) and, on
generated chats, its draft heads and its draft model (``draft_model.py``).
``compare_losses.py`` compares options for training a head, ``compare_heads.py`` the bundled heads.
All measure with ``eagle-fsd evaluate`` (``measure.py``).
"""
