"""Accelerate's state, which it keeps in classes."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState, PartialState


def forget_accelerator() -> None:
    """Accelerate keeps its state in classes; every training of a test begins anew."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
