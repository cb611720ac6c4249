"""Checks of the paths that a batch reads and writes, made before anything is loaded, without torch."""

from pathlib import Path

from kvlens import KVLensError, zoo
from kvlens.arguments import path_of
from kvlens.files import check_writable, reason


def check_prompts(prompts: str | Path) -> Path:
    """Return the path of the prompts.

    Raises:
        KVLensError: not a path, or nothing is there.
    """
    path = path_of("prompts", prompts)
    try:
        path.stat()
    except OSError as error:
        raise KVLensError(f"prompts: cannot read {path}: {reason(error)}") from error
    if not path.is_dir() and not path.is_file():
        raise KVLensError(
            f"prompts: {path} is a pipe or a device, which can be read only once; a batch reads its prompts twice, and again "
            "when it is resumed. Write them to a file first, whose name says what it is (.jsonl, .txt)"
        )
    return path


def check_table_path(out: Path) -> None:
    """Raise KVLensError unless ``out`` is a valid path of a table."""
    if out.suffix != ".parquet":
        raise KVLensError(f"out: expected a file that ends in .parquet, got {str(out)!r}")
    check_writable(out)


def check_model_name(name: str) -> None:
    """Raise KVLensError unless ``name`` may be a shipped model, a folder, or a Hugging Face name, without reading files."""
    source = zoo.source_of(name)
    if isinstance(source, Path) and not source.is_dir():
        raise KVLensError(f"--model: {name!r} is a file; give a shipped model ({', '.join(zoo.names())}) or a folder")
