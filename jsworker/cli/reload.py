"""``jsworker run --reload``: a worker that is started anew whenever a Python file here changes."""

import asyncio
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from jsworker.cli.output import remark
from jsworker.core.errors import JsworkerError
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import printable
from jsworker.embedded import start_with_parent

_SHOWN_NAMES: Final = 3
_LONGEST_NAME: Final = 100
_LONGEST_CAUSE: Final = 300


def run_reloading(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until a signal, again after each change in the working directory; return its exit code.

    A change ends it by SIGTERM, without a deadline; signals to this process are passed on to it. If it ends
    by itself, it is started at the next change.

    Raises:
        WrongUsage: watchfiles is not installed.
        JsworkerError: the directory cannot be watched.
    """
    try:
        import watchfiles  # noqa: F401, PLC0415 -- an extra
    except ImportError:
        raise WrongUsage("--reload needs watchfiles; install it: pip install 'jsworker[reload]'") from None
    return asyncio.run(_Reloader(command, environment).run())


class _Reloader:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._folder = Path.cwd()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and stays so
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, partial(self._on_signal, number))
        restarting = asyncio.create_task(self._restart_on_changes())
        await asyncio.sleep(0)  # it watches from here on: a file may change while the worker starts
        self._start()
        try:
            await restarting
        except (OSError, RuntimeError) as error:  # for example, a limit of memory or files is reached
            cause = printable(str(error), _LONGEST_CAUSE)
            raise JsworkerError(f"--reload: {self._folder} cannot be watched: {cause}") from None
        finally:
            if not self._stop.is_set():
                self._on_signal(signal.SIGTERM)
            code = await self._ended
        return code

    async def _restart_on_changes(self) -> None:
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 -- an extra

        async for changes in awatch(self._folder, watch_filter=PythonFilter(), stop_event=self._stop):
            remark(f"{self._names(path for _, path in changes)} changed: the worker is started anew")
            self._send(signal.SIGTERM)
            await self._ended
            if self._stop.is_set():
                return
            self._start()

    def _start(self) -> None:
        # In its own process group: the terminal's signals reach only this process, which passes them on. But
        # such a group is stopped when it reads from the terminal.
        self._process = start_with_parent(
            self._command, env=self._environment, process_group=0, stdin=subprocess.DEVNULL
        )
        self._ended = asyncio.create_task(self._wait(self._process))

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        code = await asyncio.to_thread(process.wait)
        if code and not self._stop.is_set():
            remark(f"the worker ended with exit code {code}; it is started anew when a Python file changes")
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: signal.Signals) -> None:
        self._stop.set()
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)  # a job that opens /dev/tty has stopped it, perhaps

    def _names(self, paths: Iterable[str]) -> str:
        names = sorted(printable(str(Path(path).relative_to(self._folder)), _LONGEST_NAME) for path in paths)
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return ", ".join(names[:_SHOWN_NAMES]) + more
