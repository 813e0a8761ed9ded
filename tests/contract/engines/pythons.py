"""A Python of executors that has some of this one's packages."""

import importlib.util
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

NEEDED_BY_TORCH = ("filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "setuptools")
TORCH = ("torch", "torchgen", "functorch", "numpy", *NEEDED_BY_TORCH)


def python_with(home: Path, packages: Iterable[str]) -> str:
    """Makes a virtual environment that has these packages and no others; its interpreter."""
    venv.create(home, symlinks=True)
    version = "python{}.{}".format(*sys.version_info)
    place = home / "lib" / version / "site-packages"
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            source = Path(spec.origin)
            source = source.parent if source.name == "__init__.py" else source
            for found in (source, source.parent / f"{name}.libs"):
                if found.exists():
                    (place / found.name).symlink_to(found)
    return str(home / "bin" / "python")
