"""In a clone, ``kvlens.analyses`` is the folder ``analyses`` next to ``kvlens``; a wheel has it in here, and finds it first."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.errors import KVLensError

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


FOLDER = Path(__file__).resolve().parents[1] / "analyses"

if __name__ == "__main__":  # python -m kvlens.analyses
    from kvlens.analyses.batch.script import main

    sys.exit(main())

spec = spec_from_file_location(__name__, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
if not (FOLDER / "registry.py").is_file() or spec is None or spec.loader is None:
    raise KVLensError(f"kvlens.analyses: {FOLDER} is missing, or not the folder that belongs to kvlens; take the whole clone")
sys.modules[__name__] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
