"""Load a target and its tokenizer, with one-line messages for missing or damaged files."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from eagle_fsd.model.config import Quantization
from eagle_fsd.model.gguf import locate_model
from eagle_fsd.model.hub import find_file
from eagle_fsd.model.weights import WEIGHT_FILES, read_tensors, tensor_files
from eagle_fsd.utils.text import one_line

#: Data types by name; ``auto`` is the checkpoint's own.
DTYPES: dict[str, str | torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}

#: Device maps that spread a model over the devices of the machine.
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
#: Error for Apple GPUs.
NO_MPS = "mps lacks float64, in which tokens are sampled: use the device cpu"

#: Options of a target with which only Hugging Face itself finds files.
OWN_SEARCH = {"cache_dir", "local_files_only", "revision"}
#: Options of a target that its tokenizer is loaded with, too.
TOKENIZER_OPTIONS = OWN_SEARCH | {"trust_remote_code"}

#: Exceptions that transformers raises for files with unexpected content.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


class LoadError(ValueError):
    """A model or a tokenizer cannot be loaded, for example because files are damaged."""


def load_target(
    name: str | Path,
    dtype: str | torch.dtype | None = None,
    device_map: str | torch.device | dict[str, Any] | None = None,
    role: str = "target",
    *,
    quantize: Quantization | None = None,
    tp_plan: Literal["auto"] | dict[str, str] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal language model with Hugging Face's ``from_pretrained``.

    ``name`` is that of :func:`~eagle_fsd.model.gguf.locate_model`; ``dtype`` is a torch dtype or a
    key of :data:`DTYPES`, by default float32 on a CPU, else the checkpoint's own; ``role`` is what
    error messages call the model; ``quantize`` is that of :func:`quantization_config`; ``tp_plan``
    splits every layer over the processes that ``torchrun`` started: ``"auto"`` for the plan of the
    architecture, or rules that override it.

    Raises :class:`LoadError` if files are missing, damaged or need a missing package, or weights
    cannot be quantized or split, ``ValueError`` for invalid and ``TypeError`` for unknown options.
    """
    if tp_plan is not None and device_map is not None:
        raise ValueError("tp_plan and device_map exclude each other: every process has one device")
    dtype, device_map = _check_placement(name, dtype, device_map, role)
    if tp_plan is not None:
        options["distributed_config"] = split = DistributedConfig(tp_plan=tp_plan)
        device_map = device_map if split.tp_size == 1 else None
    if quantize is not None:
        if "quantization_config" in options:
            raise ValueError("quantize and quantization_config exclude each other")
        options["quantization_config"] = quantization_config(quantize)
    try:
        source = str(name)
        if not OWN_SEARCH & options.keys():
            # Hugging Face would retry for minutes if the Hub cannot be reached.
            source = locate_model(name, options.get("token"))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    except (*DAMAGED, SafetensorError, RuntimeError, EOFError, ImportError) as error:
        if isinstance(error, TypeError) and "keyword argument" in str(error):
            raise  # an option does not exist
        raise LoadError(f"cannot load the {role} {name}: {one_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    if source != str(name):
        model.config.name_or_path = str(name)  # not the copy of a GGUF file
    if missing := sorted(loaded[1]["missing_keys"]):  # Hugging Face initializes them at random
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise LoadError(f"the {role} {name} lacks {len(missing)} tensors: {shown}")
    return model


def quantization_config(kind: Quantization) -> QuantizationConfigMixin:
    """Return transformers' configuration for weights that are quantized when a model is loaded.

    Embedding and output projection are not quantized.
    """
    kinds = get_args(Quantization)
    if kind not in kinds:
        raise ValueError(f"quantize must be one of {', '.join(kinds)}; got {kind!r}")
    package = "bitsandbytes" if kind == "nf4" else "torchao"
    if find_spec(package) is None:
        raise ValueError(f"quantize={kind} requires {package}; install it with pip")
    if kind == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    # The layout of torch's own kernel; the default one needs another package.
    return TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))


def load_embeddings(
    name: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    token: str | None = None,
) -> PreTrainedModel:
    """Load only the embedding and the output projection of a causal language model.

    The other weights stay on the meta device; files that hold only those are neither read nor
    downloaded. A device map that spreads a model stands for the default device.

    Raises :class:`LoadError` if files are missing, damaged or need a missing package, the two are
    quantized or the model has an adapter, and ``ValueError`` for invalid options.
    """
    dtype, device = _check_placement(name, dtype, None if device in SPREAD else device)
    try:
        return _load_embeddings(locate_model(name, token), dtype, device, token)
    except (*DAMAGED, RuntimeError, ImportError) as error:
        raise LoadError(
            f"cannot load the embedding and the output projection of {name}: {one_line(error)}"
        ) from error


def _load_embeddings(
    name: str, dtype: str | torch.dtype, device: Any, token: str | None
) -> PreTrainedModel:
    if find_file(name, "adapter_config.json", token) is not None:
        raise ValueError("it has an adapter")
    config = AutoConfig.from_pretrained(name, token=token)
    with init_empty_weights():  # buffers, such as Gemma's embedding scale, get their values
        options = {} if dtype == "auto" else {"dtype": dtype}
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    if model.config.dtype is None:
        raise ValueError("its configuration has no dtype")
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    parts = [part for part in both if part is not None]
    prefixes = tuple(f"{path}." for path, module in model.named_modules() if module in parts)
    expected = model.state_dict()
    wanted = {key for key in expected if key.startswith(prefixes)}
    files = tensor_files(partial(find_file, name, token=token))
    if not files:
        raise FileNotFoundError(f"there is none of {', '.join(WEIGHT_FILES)}")
    keys = _checkpoint_keys(model, expected, wanted, files)
    found: dict[str, Tensor] = {}
    for file in sorted({files[key] for key in keys.values()}):
        names = {key: target for target, key in keys.items() if files[key] == file}
        path = find_file(name, file, token)
        if path is None:
            raise FileNotFoundError(f"there is no {file}")
        for key, tensor in read_tensors(path, names).items():
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{key} is quantized or in {tensor.dtype}")
            found[names[key]] = tensor.to(expected[names[key]].dtype)
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights(missing_keys=wanted - found.keys(), recompute_mapping=False)
    for part in parts:
        for key, tensor in part.named_parameters():
            if tensor.is_meta:
                raise ValueError(f"there is no {key} of {type(part).__name__}")
        part.to(device)
    return model.eval()


def _checkpoint_keys(
    model: PreTrainedModel,
    expected: dict[str, Tensor],
    wanted: Collection[str],
    available: Collection[str],
) -> dict[str, str]:
    """Return the name in the checkpoint of each wanted tensor, as Hugging Face would find it."""
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    prefix = model.base_model_prefix
    found = {}
    for key in sorted(available):
        renamed, converter = rename_source_key(key, renamings, converters, prefix, expected)
        if renamed not in expected and key in expected:
            renamed, converter = key, None
        if renamed in wanted and converter is None:
            found[renamed] = key
    return found


def load_tokenizer(name: str | Path, token: str | None = None, **options: Any) -> Tokenizer:
    """Load a tokenizer that pads on the left; if it has no padding token, with its end token."""
    try:
        source = str(name)
        if not OWN_SEARCH & options.keys():
            source = locate_model(name, token)
            find_file(source, "tokenizer_config.json", token)  # fails at once, as in load_target
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            source, token=token, padding_side="left", mistral_format=False, **options
        )
    except (*DAMAGED, SafetensorError, RuntimeError, ImportError) as error:
        raise LoadError(f"cannot load the tokenizer of {name}: {one_line(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_placement(
    name: str | Path, dtype: str | torch.dtype | None, device_map: Any, role: str = "target"
) -> tuple[str | torch.dtype, Any]:
    """Validate dtype, device map and an absolute path; return the first two with defaults."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        dtype = DTYPES[dtype]
    if device_map is None:
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    uses_gpu = _uses_gpu(device_map)
    if dtype is None:
        dtype = "auto" if uses_gpu else torch.float32
    path = Path(name)
    is_file = path.suffix.lower() == ".gguf" and path.is_file()
    if path.is_absolute() and not path.is_dir() and not is_file:
        raise LoadError(f"cannot load the {role}: {name} is not a folder or a GGUF file")
    return dtype, device_map


def _uses_gpu(device_map: str | torch.device | dict[str, Any]) -> bool:
    """Whether a device map uses a device besides the CPU; raises ValueError if it is invalid."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    used = False
    for place in places:
        if isinstance(place, str) and place in SPREAD:
            if torch.backends.mps.is_available():  # where Hugging Face places models
                raise ValueError(NO_MPS)
            used = used or torch.cuda.is_available()
            continue
        if place == "disk":
            continue
        try:
            device = torch.device(place)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{place!r} is not a device: {one_line(error)}") from error
        if device.type == "meta":
            raise ValueError("cannot decode on the meta device: it holds no data")
        if device.type == "mps":
            raise ValueError(NO_MPS)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"{device} does not exist: this machine has {torch.cuda.device_count()} CUDA"
                " devices"
            )
        used = used or device.type != "cpu"
    return used
