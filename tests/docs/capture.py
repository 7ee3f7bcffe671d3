"""Writes what the commands of pages print into these pages.

python -m tests.docs.capture start/quickstart.md
python -m tests.docs.capture tutorial/1-outbox.md tutorial/2-crash.md tutorial/3-watch.md
python -m tests.docs.capture operate/capacity.md

Pages that are named together are one session, in this order. A block behind ``<!-- output of COMMAND -->`` is
what a command prints that runs in the repository.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import DOCS, commands_of, files_of
from tests.docs.session import Session

_OUTPUT = re.compile(r"(?ms)(^<!-- output of python ([^\n]*) -->\n```text\n).*?(^```$)")


def _output(block: re.Match[str]) -> str:
    command = [sys.executable, *block[2].split()]
    return block[1] + subprocess.check_output(command, cwd=DOCS.parent, text=True) + block[3]


def main(pages: list[str]) -> None:
    """Run the commands of the pages, and write their outputs."""
    # Not below a folder that only its owner may enter: PostgreSQL runs as another user where root starts it.
    with tempfile.TemporaryDirectory(prefix="guides-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Session(folder) as session:
            for page in pages:
                text = (DOCS / page).read_text()
                session.write(files_of(page))
                outputs = [(command, session.run(command)) for command in commands_of(text)]
                for command, output in reversed(outputs):
                    shown = output.replace(str(folder), "/home/you")
                    shown = "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
                    text = text[: command.start] + shown + text[command.end :]
                (DOCS / page).write_text(_OUTPUT.sub(_output, text))


if __name__ == "__main__":
    main(sys.argv[1:])
