"""Writing files and folders atomically, detecting damage, and never overwriting the user's own files.

    atomic      write to a hidden temporary name next to the target, then rename it; whether a folder may be written to
    reading     read only regular files, inside the expected folder, and valid JSON; checksums, and lists of own files
    tensors     safetensors files with a checksum
    tables      Parquet files with a checksum

All but ``tensors`` and ``tables``, which need torch and pandas, can be imported from here.
"""

from kvlens.files.atomic import (
    FolderKind,
    check_folder,
    check_writable,
    clear_leftovers,
    clear_leftovers_in,
    files_in,
    is_temporary,
    lock,
    reason,
    work_on,
    write_atomically,
    write_file,
    write_folder,
)
from kvlens.files.untrusted import (
    CARD,
    CONFIG,
    LIST,
    WEIGHTS,
    check_listed,
    check_regular,
    check_regular_files,
    check_version,
    checksum,
    checksum_of_json,
    each_once,
    file_in,
    list_files,
    listed_in,
    parsed_json,
    plain,
    read_json,
    read_listed,
    reading_file,
)

__all__ = [
    "CARD",
    "CONFIG",
    "LIST",
    "WEIGHTS",
    "FolderKind",
    "check_folder",
    "check_listed",
    "check_regular",
    "check_regular_files",
    "check_version",
    "check_writable",
    "checksum",
    "checksum_of_json",
    "clear_leftovers",
    "clear_leftovers_in",
    "each_once",
    "file_in",
    "files_in",
    "is_temporary",
    "list_files",
    "listed_in",
    "lock",
    "parsed_json",
    "plain",
    "read_json",
    "read_listed",
    "reading_file",
    "reason",
    "work_on",
    "write_atomically",
    "write_file",
    "write_folder",
]
