"""Drafters, which propose draft trees to the target.

Start with :mod:`~eagle_fsd.model.drafters.interface`. :mod:`~eagle_fsd.model.drafters.levels` grows
trees with a network; :mod:`~eagle_fsd.model.drafters.eagle` is the EAGLE-1/2 draft head.
"""
