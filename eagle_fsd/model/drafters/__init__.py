"""Drafters, which propose draft trees to the target.

Start with :mod:`~eagle_fsd.model.drafters.interface`, and with
:mod:`~eagle_fsd.model.drafters.loading`, which finds out what a name or a folder stands for.

:mod:`~eagle_fsd.model.drafters.levels` grows trees with a network. Networks are the heads, in
:mod:`~eagle_fsd.model.drafters.eagle` and :mod:`~eagle_fsd.model.drafters.eagle3` with
:mod:`~eagle_fsd.model.drafters.heads` in common, and :mod:`~eagle_fsd.model.drafters.draft_model`.
:mod:`~eagle_fsd.model.drafters.ngram` drafts without a network, and
:mod:`~eagle_fsd.model.drafters.layer_detection` chooses the hidden states of an EAGLE-3 head.
"""
