"""Find the files of a model in a folder, or in a repository on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    list_repo_files,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers.utils import CONFIG_NAME, cached_file

from eagle_fsd.utils.text import one_line


def find_file(name: str | Path, file: str, token: str | None = None) -> str | None:
    """Return the local path of a file of a folder or a Hub repository, or None.

    A file of a repository is downloaded, unless the local cache has its newest version. Without a
    network, a file that is not cached counts as missing if ``config.json`` is cached, or if the Hub
    once said that the file does not exist.

    Raises ``OSError`` if the repository does not exist, is not accessible or cannot be reached
    (failed connections are not retried), and ``ValueError`` for names that the Hub does not allow.
    """
    if Path(name).is_dir():
        path = Path(name) / file
        return str(path) if path.is_file() else None
    name = str(name)
    known = try_to_load_from_cache(name, file)
    if not isinstance(known, str):
        try:
            get_hf_file_metadata(hf_hub_url(name, file), token=token)
        except (httpx.TransportError, OfflineModeIsEnabled) as error:
            if known is not None or isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
                return None
            raise ConnectionError(
                f"{constants.ENDPOINT} cannot be reached ({one_line(error)}), and the local cache"
                f" does not have {name}"
            ) from error
        except HfHubHTTPError:
            pass  # there is no such file or no such repository, or it is not accessible
    return cached_file(name, file, token=token, _raise_exceptions_for_missing_entries=False)


def list_files(name: str, token: str | None = None) -> list[str]:
    """Return the names of the files of a folder, or of a Hub repository with its subfolders.

    Raises ``OSError`` if the repository does not exist, is not accessible or cannot be reached.
    """
    if Path(name).is_dir():
        return os.listdir(name)
    try:
        return list_repo_files(name, token=token)
    except httpx.TransportError as error:
        raise ConnectionError(
            f"{constants.ENDPOINT} cannot be reached ({one_line(error)}) to list files of {name}"
        ) from error
