"""Pickled files name the modules of their classes as they were: `manygrad.tensor.nn` is `manygrad.nn` now."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD, NEW = "manygrad.tensor.nn", "manygrad.nn"


class OldNames(MetaPathFinder, Loader):
    """Finds a module under its old name: it is the same module, not a copy of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != OLD and not fullname.startswith(f"{OLD}."):
            return None
        module = importlib.import_module(fullname.replace(OLD, NEW, 1))
        return ModuleSpec(fullname, self, loader_state=module.__spec__, is_package=hasattr(module, "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name.replace(OLD, NEW, 1))

    def exec_module(self, module: ModuleType) -> None:
        """The import system has given the module the spec of its old name by now."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    sys.meta_path.insert(0, OldNames())  # before the finder that would read files of the package a second time
