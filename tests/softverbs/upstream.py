"""Runs modules of rdma-core's tests, as the pyverbs source distribution has them, on Debian's older pyverbs.

Usage: upstream.py DIRECTORY DEVICE MODULE... where DIRECTORY holds `tests/`. Prints unittest's verbose report; exit 0
when nothing failed. Two things have moved since rdma-core 44: the enumerations had one module and no classes, and
`tests/__init__.py` imports the tests of all providers, which want new ones.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Enumeration:
    """Stands for a class of constants, which are all in pyverbs.enums."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, constant: str) -> Any:
        return getattr(importlib.import_module("pyverbs.enums"), constant)

    def __call__(self, value: int) -> "Constant":
        return Constant(value)

    def __iter__(self) -> Iterator[int]:
        """The constants by the name's convention: ibv_wc_flags begins IBV_WC_."""
        raise TypeError(f"pyverbs 44 cannot enumerate {self._name}")


class Constant(int):
    name = value = ""


class Enumerations(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        enums = importlib.import_module("pyverbs.enums")
        return getattr(enums, name, None) if hasattr(enums, name) else Enumeration(name)


class Provider(types.ModuleType):
    """Stands for the tests' helpers of one vendor's provider."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


PROVIDERS = ("tests.mlx5_base", "tests.efa_base", "tests.irdma_base")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of enumerations that pyverbs 44 has not, or has without classes (the providers')."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name in PROVIDERS:
            return importlib.machinery.ModuleSpec(name, self)
        if name.startswith("pyverbs.") and name.endswith("_enums") and name != "pyverbs.cm_enums":
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Provider(spec.name) if spec.name in PROVIDERS else Enumerations(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in PROVIDERS:
            return
        constants = vars(importlib.import_module("pyverbs.enums"))
        vars(module).update({name: value for name, value in constants.items() if not name.startswith("_")})


# imported by the helpers, not used by what is run here
ABSENT = {"pyverbs.mem_alloc": ("madvise",)}


def main() -> None:
    directory, device, *modules = sys.argv[1:]
    sys.meta_path.insert(0, Finder())
    for module, names in ABSENT.items():
        for name in names:
            setattr(importlib.import_module(module), name, None)
    package = types.ModuleType("tests")
    package.__path__ = [str(Path(directory) / "tests")]
    sys.modules["tests"] = package
    sys.path.insert(0, str(Path(directory) / "tests"))
    sys.argv = [sys.argv[0], "--dev", device]
    importlib.import_module("args_parser").parser.parse_args()
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromModule(importlib.import_module(f"tests.{m}")) for m in modules)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    raise SystemExit(0 if result.wasSuccessful() else 1)


if __name__ == "__main__":
    main()
