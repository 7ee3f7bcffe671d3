"""Draws what ``make demo`` prints, from a real run.

PYTHONPATH=examples python -m tests.site.capture_demo docs/demo.svg
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import rich._export_format
from rich.console import Console
from rich.segment import Segment

from code_evolution import __main__ as demo

ROOT = Path(__file__).parents[2]
COLUMNS = 100
# As rich draws it, but with fonts of the reader's own: rich's format loads one from elsewhere.
FORMAT = re.sub(r"(?s)@font-face \{\{.*?\n    \}\}\n", "", rich._export_format.CONSOLE_SVG_FORMAT)


def main(picture: Path) -> int:
    """Run the demo in a clone, with an empty home, and draw its lines."""
    recorded: list[Console] = []

    def console(**_: Any) -> Console:
        # No terminal: bars would be recorded once for each of their moves.
        recorded.append(Console(record=True, width=COLUMNS, force_terminal=False, color_system="truecolor"))
        return recorded[0]

    with TemporaryDirectory() as home, patch.object(demo, "Console", console):
        Path(home).chmod(0o755)  # PostgreSQL runs as another user where this one is root
        clone = Path(home, "jsworker")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        os.chdir(clone)
        os.environ["HOME"] = home
        code = demo.main([])
    [console_] = recorded
    lines = [Segment(part.text.replace(home, "~"), part.style) for part in console_._record_buffer]
    console_._record_buffer[:] = [Segment("$ make demo\n"), *lines]
    svg = console_.export_svg(title="jsworker", code_format=FORMAT, unique_id="demo")
    picture.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
