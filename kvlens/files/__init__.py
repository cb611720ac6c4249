"""Writing files and folders atomically, detecting damage, and never overwriting the user's own files.

    atomic      write to a hidden temporary file next to the target, then rename it; remove leftovers of interrupted writes
    reading     read only regular files, inside the expected folder, and valid JSON
    manifest    checksums, and the JSON file that lists a folder's own files with their checksums
    folders     whether a folder may be written to, and writing it
    work        one command at a time for an output folder
    tensors     safetensors files with a checksum
    tables      Parquet files with a checksum

All but ``tensors`` and ``tables``, which need torch and pandas, can be imported from here.
"""

from kvlens.files.atomic import (
    check_writable,
    clear_leftovers,
    clear_leftovers_in,
    files_in,
    is_temporary,
    lock,
    reason,
    write_atomically,
    write_file,
)
from kvlens.files.folders import FolderKind, check_folder, write_folder
from kvlens.files.manifest import (
    CARD,
    LIST,
    check_listed,
    checksum,
    checksum_of_json,
    list_files,
    listed_in,
    plain,
    read_listed,
)
from kvlens.files.reading import check_regular, check_regular_files, check_version, file_in, parsed_json, read_json
from kvlens.files.work import work_on

__all__ = [
    "CARD",
    "LIST",
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
    "reason",
    "work_on",
    "write_atomically",
    "write_file",
    "write_folder",
]
