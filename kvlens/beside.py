"""Files beside a model's weights that are read back: ``config.json`` lists their checksums, and they are read against those.

Loading a model does not need them, so they may be missing. A model card is for people: it may be edited, and is not listed.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from kvlens.checksum import checksum, checksum_of_json
from kvlens.errors import KVLensError
from kvlens.files import file_in, read_json

CONFIG, LIST, CARD = "config.json", "beside", "MODEL_CARD.md"


def list_beside(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files into the configuration of the model in ``folder``."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config[LIST] = {name: checksum((folder / name).read_bytes()) for name in sorted(names)}
    config["checksum"] = checksum_of_json(config)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_beside(folder: Path, name: str) -> bytes:
    """The contents of a file beside a model; one that is not listed, such as a file of one's own, is read as it is.

    Raises:
        KVLensError: it is not what was written, or cannot be read.
    """
    config = read_json("model", folder / CONFIG)
    try:
        listed = config.get(LIST, {}).get(name)
        content = file_in("model", folder, name).read_bytes()
        whole = "checksum" not in config or config["checksum"] == checksum_of_json(config)
    except (OSError, AttributeError) as error:
        raise KVLensError(f"{folder / name} or the {CONFIG} beside it cannot be read ({error})") from error
    if not whole or listed not in (None, checksum(content)):
        raise KVLensError(f"{folder / name} is damaged: it is not what was saved; take a copy of the model that is whole")
    return content
