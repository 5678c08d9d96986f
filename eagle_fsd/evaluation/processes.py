"""What each of the processes does that ``torchrun`` or ``accelerate launch`` started.

They either divide the questions, with a whole target each, or decode together with a target whose
layers are split over them. In the second case, every process runs the whole command as if it were
the only one, and takes from the first one what may differ between them, such as timings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import DistributedType, broadcast_object_list

from eagle_fsd.model.config import TENSOR_PARALLEL, PairOptions
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.target import Target
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.processes import start_processes

T = TypeVar("T")


def join_processes() -> bool:
    """Let each process do all of the work with the others; return whether it is the first one."""
    state = start_processes()
    is_first = state.is_main_process
    state.distributed_type = DistributedType.NO
    state.num_processes, state.process_index = 1, 0
    return is_first


def on_first_process(function: Callable[[], T]) -> T:
    """Call a function on the first process, and return its result on all of them."""
    found: list[Any] = [None]
    if start_processes().is_main_process:
        found[0] = function()
    broadcast_object_list(found)
    result: T = found[0]
    return result


def placement(device: str | None) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that select the target's devices."""
    if device != TENSOR_PARALLEL:
        return {"device_map": device}
    if start_processes().num_processes > 1:
        raise OptionsError(
            f"this command does not support --device {TENSOR_PARALLEL}; use --device auto in a"
            " single process"
        )
    return {"tp_plan": "auto"}


def load_models(options: PairOptions, drafter: Drafter | None = None, **others: Any) -> EagleFSD:
    """Load the pair that options name; ``others`` are arguments of ``from_pretrained``."""
    model = EagleFSD.from_pretrained(
        options.target,
        options.drafter if drafter is None else drafter,
        dtype=options.dtype,
        **placement(options.device),
        draft_vocabulary=options.draft_vocabulary,
        quantize=options.quantize,
        **others,
    )
    model.capture = options.capture
    return model


def from_first(target: Target, function: Callable[[], T]) -> T:
    """Call a function in the first of the processes that the target is split over, for all of them.

    The function must not run the target.
    """
    if target.group is None:
        return function()
    found: list[Any] = [function() if dist.get_rank(target.group) == 0 else None]
    dist.broadcast_object_list(found, group=target.group, group_src=0)
    result: T = found[0]
    return result
