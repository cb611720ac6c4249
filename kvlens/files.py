"""Writing files whole or not at all: into a temporary neighbour first, then renamed into place."""

import os
import tempfile
from pathlib import Path

from kvlens.errors import KVLensError


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` so that a reader, or an interrupt at any moment, sees the old file or the whole new one.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
