import asyncio
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from code_evolution import lines as counted_lines
from code_evolution.git import GitError, GitKilled
from code_evolution.lines import LARGEST_BLOB_BYTES, count_lines, count_text_lines

from .demo_process import EXAMPLES
from .repositories import commit, damage, git, new_repository, object_file

LANGUAGE_BY_SUFFIX = {".py": "Python", ".go": "Go", ".rs": "Rust", ".md": "Markdown", ".sh": "Shell"}


def count_naively(work_tree: Path) -> dict[str, int]:
    """Count the files of a checkout one line at a time, by other means than the demo does."""
    totals: Counter[str] = Counter()
    for folder, _, names in os.walk(os.fsencode(work_tree)):
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 -- names are bytes
            language = LANGUAGE_BY_SUFFIX.get(os.path.splitext(os.fsdecode(name))[1])  # noqa: PTH122 -- the same
            ignored = b".git" in path.split(b"/") or b"vendor" in path.split(b"/")
            if ignored or language is None or os.path.islink(path):  # noqa: PTH114 -- the same
                continue
            with open(path, "rb") as file:  # noqa: PTH123 -- the same
                content = file.read()
            if 0 not in content[:8000] and len(content) <= 2 * 1024 * 1024:
                totals[language] += sum(1 for line in content.split(b"\n") if line.strip(b" \t\r\f\v") != b"")
    return dict(+totals)


async def ignore_progress(_stage: str, _share: float) -> None:
    """Tell nobody."""


async def count(folder: Path, commit_id: str, memory: dict[bytes, int] | None = None) -> dict[str, int]:
    return await count_lines(
        str(folder / ".git"), commit_id, memory={} if memory is None else memory, progress=ignore_progress
    )


def git_children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child.name() == "git":
                found.append(child)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = new_repository(tmp_path / "project")
    commit(
        folder,
        {
            "a.py": b"import os\n\n\n  \t\nprint(os.name)\n",
            "same content, other place.py": b"import os\n\n\n  \t\nprint(os.name)\n",
            "no line end.go": b"package main",
            "windows.go": b"package main\r\n\r\nfunc main() {}\r\n",
            "empty.rs": b"",
            "blank.rs": b"\n \n\t\n",
            "ünï/cödé.md": "# Überschrift\n\n項目\n".encode(),
            "two\nlines\ttab.py": b"x = 1\n",
            'quotes " and \\ .py': b"y = 1\n",
            " -leading.py": b"z = 1\n",
            "vendor/lib/huge.py": b"v = 1\n" * 100,
            "binary.py": b"x = 1\n\0\n" * 10,
            "late binary.py": b"x = 1\n" * 2000 + b"\0",
            "just fits.go": b"x\n" * (LARGEST_BLOB_BYTES // 2),
            "too large.go": b"x\n" * (LARGEST_BLOB_BYTES // 2) + b"x",
            "unknown.xyz": b"one\ntwo\n",
            "latin.py": "# naïve\nx = 1\n".encode("latin-1"),
        },
    )
    (folder / os.fsdecode(b"not utf-8 \xff.py")).write_bytes(b"a = 1\nb = 2\n")
    (folder / "link.py").symlink_to("a.py")
    (folder / "run.sh").write_bytes(b"#!/bin/sh\necho\n")
    (folder / "run.sh").chmod(0o755)
    return folder


async def test_counts_what_an_independent_count_of_the_checkout_finds(project: Path) -> None:
    submodule = commit(new_repository(project.parent / "module"), {"m.py": b"m = 1\n"})
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{submodule},module.py")
    (project / "module.py").mkdir()
    head = commit(project, {})

    counted = await count(project, head)

    assert git(project, "ls-tree", head, "module.py", "link.py").count("\n") == 1
    assert counted == count_naively(project)
    assert counted == {
        "Go": 1 + 2 + 1024 * 1024,
        "Python": 2 + 2 + 3 + 2001 + 2 + 2,
        "Markdown": 2,
        "Shell": 2,
    }
    assert list(counted.values()) == sorted(counted.values(), reverse=True)


async def test_counts_each_commit_of_a_history_and_not_the_work_tree(tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "growing")
    memory: dict[bytes, int] = {}
    expected: dict[str, dict[str, int]] = {}
    for step in range(8):
        changed: dict[str, bytes | None] = {
            f"module{step}.py": b"line\n" * (step + 1),
            "shared.md": b"text\n" * step,
        }
        made = commit(folder, changed)
        expected[made] = count_naively(folder)
    (folder / "shared.md").write_bytes(b"never committed\n" * 99)

    counted = {each: await count(folder, each, memory) for each in expected}

    assert counted == expected
    assert len({tuple(lines.items()) for lines in counted.values()}) == len(expected)


async def test_an_empty_commit_has_no_lines(tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "empty")

    assert await count(folder, commit(folder, {})) == {}


async def test_counts_a_repository_with_sha256_objects(tmp_path: Path) -> None:
    folder = tmp_path / "sha256"
    folder.mkdir()
    git(folder, "init", "--quiet", "--object-format=sha256")
    head = commit(folder, {"a.py": b"a = 1\n"})

    assert len(head) == 64
    assert await count(folder, head) == {"Python": 1}


async def test_counts_many_commits_at_once(project: Path) -> None:
    heads = [commit(project, {"more.py": b"x = 1\n" * n}) for n in range(1, 9)]
    memory: dict[bytes, int] = {}

    counted = await asyncio.gather(*(count(project, head, memory) for head in heads))

    assert [lines["Python"] - counted[0]["Python"] for lines in counted] == list(range(8))
    assert git_children() == []


async def test_reads_a_blob_only_once(project: Path) -> None:
    first = commit(project, {"extra.py": b"only here\n"})
    memory: dict[bytes, int] = {}
    before = await count(project, first, memory)
    for name in ("a.py", "extra.py"):
        blob = git(project, "rev-parse", f"{first}:{name}")
        object_file(project / ".git", blob).chmod(0o644)
        # The header stays readable for the listing; the content does not.
        packed = object_file(project / ".git", blob).read_bytes()
        object_file(project / ".git", blob).write_bytes(packed[:-6] + b"damage")

    assert await count(project, first, memory) == before
    with pytest.raises(GitError):
        await count(project, first, {})


async def test_tells_stages_and_rising_shares(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_lines, "_PROGRESS_INTERVAL", 0.0)
    told: list[tuple[str, float]] = []

    async def note(stage: str, share: float) -> None:
        told.append((stage, share))

    await count_lines(str(project / ".git"), commit(project, {}), memory={}, progress=note)

    assert [stage for stage, _ in told][:2] == ["list", "count"]
    assert {stage for stage, _ in told[2:]} == {"count"}
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


class TestBrokenRepositories:
    @pytest.mark.parametrize("harm", ["missing", "damaged"])
    @pytest.mark.parametrize("what", ["HEAD:a.py", "HEAD:ünï", "HEAD^{tree}", "HEAD"])
    async def test_names_the_object_and_the_repository(self, project: Path, what: str, harm: str) -> None:
        head = commit(project, {})
        victim = git(project, "rev-parse", what)
        if harm == "missing":
            object_file(project / ".git", victim).unlink()
        else:
            damage(project / ".git", victim)

        with pytest.raises(GitError) as refusal:
            await count(project, head)

        assert f"repository {project}/.git: " in str(refusal.value)
        assert victim in str(refusal.value) or f"commit {head} or its tree" in str(refusal.value)
        assert str(refusal.value).endswith(" is missing or damaged")
        assert git_children() == []

    async def test_names_a_blob_whose_end_is_damaged(self, project: Path) -> None:
        head = commit(project, {"long.py": b"".join(b"%d\n" % n for n in range(100_000))})
        victim = git(project, "rev-parse", "HEAD:long.py")
        path = object_file(project / ".git", victim)
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:50_000])

        with pytest.raises(GitError, match=f"object {victim} is missing or damaged"):
            await count(project, head)

    async def test_survives_more_complaints_than_a_pipe_holds(self, tmp_path: Path) -> None:
        folder = new_repository(tmp_path / "ruin")
        head = commit(folder, {f"{n}.py": b"%d\n" % n for n in range(600)})
        for listed in git(folder, "ls-tree", head).splitlines():
            damage(folder / ".git", listed.split()[2])

        async with asyncio.timeout(60):
            with pytest.raises(GitError, match="is missing or damaged"):
                await count(folder, head)

    async def test_does_not_fetch_what_a_partial_clone_left_out(self, project: Path, tmp_path: Path) -> None:
        head = commit(project, {})
        git(project, "config", "uploadpack.allowFilter", "true")
        partial = tmp_path / "partial"
        git(
            tmp_path,
            "clone",
            "--quiet",
            "--no-checkout",
            "--filter=blob:none",
            f"file://{project}",
            str(partial),
        )

        with pytest.raises(GitError, match=r"object [0-9a-f]{40} was left out of this partial clone"):
            await count(partial, head)

        assert " missing" in git(partial, "rev-list", "--objects", "--missing=print", head).replace(
            "?", " missing "
        )

    async def test_says_when_the_repository_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(GitError, match=r"gone/\.git cannot be read: fatal: not a git repository"):
            await count(tmp_path / "gone", "0" * 40)

    async def test_says_when_git_is_not_installed(
        self, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = commit(project, {})
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(GitError, match="git is not installed"):
            await count(project, head)


class TestEndingEarly:
    @pytest.fixture
    async def stuck(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[dict[str, int]]:
        """A count whose git has more to say than anybody reads."""
        folder = new_repository(tmp_path / "large")
        head = commit(folder, {f"{n}.py": os.urandom(1024 * 1024).hex().encode() for n in range(4)})
        monkeypatch.setattr(counted_lines, "_PROGRESS_INTERVAL", 0.0)
        reading = asyncio.Event()

        async def stop_reading(_stage: str, share: float) -> None:
            if share > 0.2:
                reading.set()
                await asyncio.Event().wait()

        counting = asyncio.create_task(
            count_lines(str(folder / ".git"), head, memory={}, progress=stop_reading)
        )
        async with asyncio.timeout(60):
            await reading.wait()
        return counting

    async def test_a_cancelled_count_leaves_no_git_behind(self, stuck: asyncio.Task[dict[str, int]]) -> None:
        (running,) = git_children()
        running.suspend()  # it will not end by itself

        stuck.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await stuck

        assert not running.is_running()
        assert git_children() == []

    async def test_a_git_ended_by_a_signal_is_no_broken_repository(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = commit(project, {f"{n}.py": os.urandom(1024 * 1024).hex().encode() for n in range(4)})
        monkeypatch.setattr(counted_lines, "_PROGRESS_INTERVAL", 0.0)

        async def kill_git(_stage: str, _share: float) -> None:
            for child in git_children():
                with suppress(psutil.NoSuchProcess):
                    child.kill()

        with pytest.raises(GitKilled, match="git cat-file was ended by signal 9"):
            await count_lines(str(project / ".git"), head, memory={}, progress=kill_git)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", 0),
        (b"\n", 0),
        (b"x", 1),
        (b"x\n", 1),
        (b"\n\nx\n \t \ny", 2),
        (b"a\rb\r\nc\n", 3),
        (b"x\n\0", 0),
        (b"x\n" * 4000 + b"\0", 4001),
        (b"x\n" * 3999 + b"\0", 0),
    ],
)
def test_counts_lines_that_are_not_blank(content: bytes, lines: int) -> None:
    assert count_text_lines(content) == lines


COUNT_AND_GET_STUCK = """
import asyncio, sys
import psutil
from code_evolution import lines

async def stop_reading(stage, share):
    if share > 0.2:
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        await asyncio.Event().wait()

lines._PROGRESS_INTERVAL = 0.0
asyncio.run(lines.count_lines(*sys.argv[1:], memory={}, progress=stop_reading))
"""


def test_a_worker_killed_in_the_middle_leaves_no_git_behind(tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "large")
    head = commit(folder, {f"{n}.py": os.urandom(1024 * 1024).hex().encode() for n in range(4)})
    arguments = [sys.executable, "-c", COUNT_AND_GET_STUCK, str(folder / ".git"), head]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        (running,) = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        assert running.name() == "git"

        worker.kill()

        _, alive = psutil.wait_procs([running], timeout=60)
        assert alive == []
