"""Supervisors of a test, on its own database and stream."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from jsworker.core.settings import Settings, variable_of
from tests.supervisor.parent_process import ParentProcess


class Supervise(Protocol):
    """Starts ``jsworker run`` on targets of ``jobs_module``; keyword arguments replace settings."""

    def __call__(
        self,
        *targets: str,
        prefix: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        output: int | None = None,
        **changes: Any,
    ) -> ParentProcess: ...


@pytest.fixture
def supervise(make_settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Supervise]:
    (tmp_path / "my_jobs.py").write_text(Path(__file__).with_name("jobs_module.py").read_text())
    started: list[ParentProcess] = []

    def start(
        *targets: str,
        prefix: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        output: int | None = None,
        **changes: Any,
    ) -> ParentProcess:
        settings = make_settings(**changes)
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        parent = ParentProcess(
            *(target if ":" in target else f"my_jobs:{target}" for target in targets),
            folder=tmp_path,
            environment={variable_of(name): str(value) for name, value in given.items()},
            options=options,
            prefix=prefix,
            output=output,
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        parent.kill_all()
