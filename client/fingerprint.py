"""One short string that tells whether server and client run the same code.

In a simulation the engine's workers put the SuperLink's working directory ahead of the app bundle on their
import path, so packages named `client`, `server` or `rotfed` that happen to lie there are imported in place
of the bundle's. The server therefore sends its fingerprint along, and the client compares.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import client
import rotfed
from rotfed.errors import RotfedError

KEY = "code-fingerprint"


class CodeMismatchError(RotfedError):
    """Client and server run different code."""


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Version of rotfed and a hash over the sources of `rotfed` and `client`: "0.1.0+1f3a5b7c9d2e"."""
    digest = hashlib.sha256()
    for package in (rotfed, client):
        root = _folder(package.__file__)
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(path.relative_to(root.parent).as_posix().encode())
                # Line ends are normalised: a checkout on another system is still the same code.
                digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return f"{rotfed.__version__}+{digest.hexdigest()[:12]}"


def check_fingerprint(expected: object) -> None:
    """Raise CodeMismatchError unless `expected`, as sent by the server, is this process's fingerprint."""
    found = fingerprint()
    if expected != found:
        raise CodeMismatchError(
            f"client code differs from the server's: expected rotfed {expected}, found rotfed {found} in "
            f"{_folder(client.__file__).parent}; install one version everywhere, and start the SuperLink or "
            "SuperNode from a folder that holds no packages named client, server or rotfed"
        )


def _folder(file: str | None) -> Path:
    assert file is not None, "rotfed and client are regular packages"
    return Path(file).resolve().parent
