"""Makes a package of kvlens available under a second, short name, without ever loading a module twice.

``analyses`` is short for ``kvlens.analyses``. kvlens itself uses only the long name, so that a user's own file, folder or
package called ``analyses`` keeps that name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ShortName(MetaPathFinder, Loader):
    """Provides the module of kvlens when it is imported by its short name."""

    def __init__(self, short: str):
        self.short = short

    def find_spec(self, name: str, path: Iterable[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec for modules under the short name; none for ``__main__``, which is run and not imported."""
        here = name.startswith(f"{self.short}.") and not name.endswith(".__main__")
        return ModuleSpec(name, self) if here and importlib.util.find_spec(_long(name)) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its long name."""
        module = importlib.import_module(_long(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; the spec that the import system put in comes out again."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def stand_for_long_name(short: str) -> None:
    """Make the package ``short``, which calls this, and all in it those of the package that kvlens has by this name."""
    if not any(isinstance(finder, ShortName) and finder.short == short for finder in sys.meta_path):
        sys.meta_path.insert(0, ShortName(short))
    sys.modules[short] = importlib.import_module(_long(short))


def _long(name: str) -> str:
    return f"{__package__}.{name}"
