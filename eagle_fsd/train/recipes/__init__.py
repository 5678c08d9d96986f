"""Train and measure the bundled pair, and compare losses for training its head.

Start with ``bundled.py``, which trains and measures the pair: the target (``target.py``) and, on
generated chats (``chats.py``), its draft head. ``compare_losses.py`` compares options for training
the head. Both measure with ``eagle-fsd evaluate`` (``measure.py``).
"""
