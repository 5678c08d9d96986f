"""Reset the state that Accelerate keeps in class attributes."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_accelerator_state() -> None:
    """Forget every Accelerate setting, so that one test's training does not configure the next."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
