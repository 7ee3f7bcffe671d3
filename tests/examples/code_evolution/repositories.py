"""Real git repositories for the tests, made with the git command."""

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

START = datetime(2021, 1, 10, 12, tzinfo=UTC)


def git(folder: Path, *arguments: str, date: datetime = START, stdin: bytes = b"") -> str:
    """Run git as a fixed author at a fixed time, without any configuration of this machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = {
        f"GIT_{role}_{fact}": value
        for role in ("AUTHOR", "COMMITTER")
        for fact, value in (
            ("NAME", "Ada"),
            ("EMAIL", "ada@example.org"),
            ("DATE", f"{date.timestamp():.0f} +0000"),
        )
    }
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "safe.directory=*", "-c", "protocol.file.allow=always", *arguments],
        env=clean | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def new_repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def commit(folder: Path, files: dict[str, bytes | None], date: datetime = START) -> str:
    """Write files (None deletes one), commit everything and return the commit's id."""
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "change", date=date)
    return git(folder, "rev-parse", "HEAD")


def repository_with_dates(folder: Path, dates: list[datetime]) -> Path:
    """Make a repository with one empty commit for each date; fast for thousands of them."""
    new_repository(folder)
    stream = "".join(
        f"commit refs/heads/main\ncommitter Ada <ada@example.org> {date.timestamp():.0f} +0000\ndata 1\n.\n"
        for date in dates
    )
    git(folder, "fast-import", "--quiet", stdin=stream.encode())
    return folder


def every(days: float, count: int) -> list[datetime]:
    return [START + timedelta(days=days * place) for place in range(count)]


def object_file(git_dir: Path, object_id: str) -> Path:
    return git_dir / "objects" / object_id[:2] / object_id[2:]


def damage(git_dir: Path, object_id: str) -> None:
    path = object_file(git_dir, object_id)
    path.chmod(0o644)
    path.write_bytes(b"not what git wrote")
