"""Decoding: a target, a drafter, draft trees, verification, and the loop around them.

Start with ``verify.py`` (the mathematics) and ``acceptance`` (which tokens may be relaxed), then
``tree.py`` and ``engine.py`` (one step), ``generation.py`` (the loop over steps) and
``pipeline.py`` (:class:`~eagle_fsd.model.pipeline.EagleFSD`, the public interface). ``target.py``
and ``drafters`` wrap the two models, ``cache.py`` their key-value caches. The options are declared
in ``config.py``.
"""
