"""``jsworker drain`` and ``undrain``: workers that claim nothing more."""

from typing import Annotated

from jsworker.cli.client_call import ask_client
from jsworker.cli.options import argument, new_app
from jsworker.cli.output import print_line
from jsworker.core.names import cell

app = new_app()

WorkerId = Annotated[str, argument("ID", "The worker, as `jsworker workers` names it.")]


@app.command()
def drain(worker_id: WorkerId) -> None:
    """Let a worker claim no more jobs; its running jobs continue.

    It learns of it with its next heartbeat, and hands back at once what it has claimed ahead. It stays
    drained until `jsworker undrain`, or until its process starts anew.

    Example: `jsworker drain jsworker-0-17-5f1c8a2e`
    """
    ask_client(lambda client: client.drain_worker(worker_id))
    print_line(f"worker {cell(worker_id)} is to be drained")


@app.command()
def undrain(worker_id: WorkerId) -> None:
    """Let a drained worker claim jobs again.

    Example: `jsworker undrain jsworker-0-17-5f1c8a2e`
    """
    ask_client(lambda client: client.undrain_worker(worker_id))
    print_line(f"worker {cell(worker_id)} claims jobs again")
