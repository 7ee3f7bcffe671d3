"""``jsworker demo``: the way into the demo."""

from pathlib import Path
from typing import Annotated

import typer

from jsworker.cli.options import new_app
from jsworker.core.errors import ServersUnavailable

app = new_app()


@app.command()
def demo(
    repositories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="REPO",
            help="Local git repositories; default: the one around the working directory.",
            show_default=False,
        ),
    ] = None,
    *,
    kill: Annotated[
        bool,
        typer.Option("--kill/--no-kill", metavar="", help="Kill one of the three workers in the middle."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object at the end.", show_default=False)
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Data folder of the servers; default: one in your cache.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the chart is written.", show_default=False)
    ] = None,
) -> int:
    """Count lines by language over the history of git repositories, on real servers.

    Three worker processes do the jobs, and one of them is killed on the way: you see its jobs taken back and
    run again, and that nothing is lost. Needs the extra "demo": pip install 'jsworker[demo]'.
    """
    try:
        # Here and not above: this help can be read without the extra.
        from jsworker.demo.command import run_demo  # noqa: PLC0415 -- see above
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jsworker"):
            raise
        raise ServersUnavailable(
            f"the demo needs the package {error.name}: pip install 'jsworker[demo]'"
        ) from None
    return run_demo(repositories or [], kill=kill, json_output=as_json, data=data, out=out)
