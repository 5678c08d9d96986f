"""Decoding: a target, a drafter, draft trees, verification, and the loop around them.

Start with ``verify.py`` (the mathematics) and ``acceptance`` (which tokens may be relaxed), then
``tree.py`` and ``step.py`` (one step), ``execution.py`` (how it runs), ``batch.py`` (rows join and
leave) and ``pipeline.py`` (:class:`~eagle_fsd.model.pipeline.EagleFSD`, the public interface).
``target.py`` and ``drafters`` wrap the two models, ``cache.py`` their key-value caches. The options
are declared in ``config.py``.
"""
