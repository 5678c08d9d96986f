"""Find the Hugging Face model inside the wrappers of PEFT and ``torch.compile``."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

#: PEFT methods that compute outside the modules of the wrapped model, besides prompt learning.
OUTSIDE_MODEL = ("POLY", "SHADOW", "XLORA")


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model inside a PEFT model or a module compiled by ``torch.compile``.

    Raises ``ValueError`` if part of a PEFT adapter is outside the model, such as prompt tuning's
    virtual tokens, and ``TypeError`` if there is no Hugging Face model inside.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config"):
            _check_adapters(inner)
            inner = inner.base_model.model
        else:
            raise TypeError(
                f"a target or draft model must be a Hugging Face model; got {type(model).__name__}"
                + (f" around {type(inner).__name__}" if inner is not model else "")
            )
    return inner


def _check_adapters(model: Any) -> None:
    for name, config in model.peft_config.items():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            method = "aLoRA"
        elif not config.is_prompt_learning and method not in OUTSIDE_MODEL:
            continue
        raise ValueError(
            f"the {method} adapter {name!r} is not supported, because it computes outside the"
            " model's own modules, which process draft trees"
        )
