"""The demo as people run it: real repositories, real servers, real signals."""

import fcntl
import re
import shutil
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from code_evolution.__main__ import main
from tests.support.servers import new_servers_folder

from .demo_process import DemoProcess, nothing_is_left_of, processes_of, run_demo_process
from .repositories import START, commit, damage, git, new_repository, object_file

pytestmark = pytest.mark.timeout(600)

COMMITS = 26
EXTENSIONS = {".py": "Python", ".go": "Go"}


@pytest.fixture(scope="module")
def servers_folder() -> Iterator[Path]:
    """The data folder of all demos of this module: each finds what the ones before left there."""
    parent = new_servers_folder()
    yield parent / "data"
    left = processes_of(parent)
    for process in left:
        process.kill()
    shutil.rmtree(parent)
    assert left == []


@pytest.fixture
def data(servers_folder: Path, project: Path) -> Iterator[Path]:
    yield servers_folder
    assert nothing_is_left_of(servers_folder, project), processes_of(servers_folder, project)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = new_repository(tmp_path_factory.mktemp("projects") / "project")
    for number in range(COMMITS):
        files = {f"{number}.py": b"a = 1\n\n" * number, "sub/all.go": b"package a\n" * (number + 1)}
        commit(folder, {**files, "notes.unknown": b"x\n"}, START + timedelta(days=number))
    return folder


@pytest.fixture(scope="module")
def slow_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that takes long to count: after the kill there is work for many seconds."""
    folder = new_repository(tmp_path_factory.mktemp("projects") / "slow")
    commit(folder, {"all.py": b"a = 1\n" * 8_000_000}, START)
    for number in range(1, 40):
        commit(folder, {f"{number}.py": b"b = 2\n"}, START + timedelta(days=number))
    return folder


def independent_count(folder: Path, commit_id: str) -> dict[str, int]:
    """Count the lines of a commit from a checkout of it."""
    checkout = folder.parent / commit_id
    git(folder, "worktree", "add", "--detach", str(checkout), commit_id)
    lines: dict[str, int] = {}
    for path in checkout.rglob("*"):
        if language := EXTENSIONS.get(path.suffix):
            filled = sum(1 for line in path.read_text().split("\n") if line.strip())
            lines[language] = lines.get(language, 0) + filled
    git(folder, "worktree", "remove", str(checkout))
    return lines


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Call the demo, which ends before it begins, and return its exit code and its only line."""
    code = main(["--out", "charts", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    return code, line


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("working-directory"))


def test_a_killed_worker_loses_nothing(data: Path, project: Path, tmp_path: Path) -> None:
    result = run_demo_process(data, "--json", "--out", tmp_path / "charts", project)

    assert result.code == 0, result
    found = result.json
    assert (found["jobs"], found["completed"], found["lost"]) == (COMMITS, COMMITS, 0)
    assert found["recovered"] >= 1
    assert "killed with SIGKILL while it owned" in result.err
    told = re.findall(r"runs again on worker-\d+, ([\d.]+) s after the kill", result.err)
    assert len(told) == found["recovered"]
    assert max(map(float, told)) == pytest.approx(found["recovery_seconds"], abs=0.051)
    # On a busy machine the worker may have been silent for most of the threshold when it is killed.
    assert 0.0 < found["recovery_seconds"] < found["seconds"]
    [repository] = found["repositories"]
    assert repository["repository"] == str(project)
    commits = [sample["commit"] for sample in repository["samples"]]
    assert commits == git(project, "rev-list", "--reverse", "HEAD").split()
    middle = repository["samples"][17]
    assert middle["lines"] == independent_count(project, middle["commit"])
    assert middle["date"] == (START + timedelta(days=17)).isoformat()
    assert (tmp_path / "charts" / "project.svg").read_text().startswith("<?xml")
    assert (tmp_path / "charts" / "project.png").read_bytes().startswith(b"\x89PNG")


def test_sigkill_leaves_no_process_and_no_work_for_the_next_demo(
    data: Path, project: Path, slow_project: Path, tmp_path: Path
) -> None:
    with DemoProcess(data, "--json", "--out", tmp_path, slow_project) as demo:
        demo.wait_for("killed with SIGKILL").send(signal.SIGKILL)
        assert demo.finish().code == -signal.SIGKILL
    assert nothing_is_left_of(data, slow_project)

    # As most people start it: the repository around the working directory, charts beside the work.
    result = run_demo_process(data, "--json", "--no-kill", cwd=project / "sub")

    assert result.code == 0, result
    figures = {name: result.json[name] for name in ("jobs", "completed", "recovered", "recovery_seconds")}
    assert figures == {"jobs": COMMITS, "completed": COMMITS, "recovered": 0, "recovery_seconds": None}
    assert "killed" not in result.err
    assert (project / "sub" / "jsworker-demo" / "project.png").exists()


@pytest.mark.parametrize(
    ("moment", "signals"),
    [
        pytest.param("killed with SIGKILL", [signal.SIGINT], marks=pytest.mark.thorough),
        pytest.param("killed with SIGKILL", [signal.SIGINT, signal.SIGINT], marks=pytest.mark.thorough),
        ("killed with SIGKILL", [signal.SIGTERM]),
        ("Starting NATS", [signal.SIGTERM]),
    ],
    ids=["ctrl-c", "ctrl-c twice", "sigterm", "sigterm while the servers start"],
)
def test_a_signal_ends_it_with_one_line(
    data: Path, slow_project: Path, tmp_path: Path, moment: str, signals: list[signal.Signals]
) -> None:
    with DemoProcess(data, "--json", "--out", tmp_path, slow_project) as demo:
        demo.wait_for(moment)
        for number in signals:
            demo.send(number)
        result = demo.finish()

    assert (result.code, result.out) == (128 + signals[0], "")
    assert "Traceback" not in result.err
    assert result.err.splitlines()[-1] == "interrupted: workers and servers are stopped"


def test_a_broken_object_fails_its_job_and_three_jobs_are_enough_for_a_kill(
    data: Path, tmp_path: Path
) -> None:
    folder = new_repository(tmp_path / "broken")
    for number in range(3):
        head = commit(folder, {"a.py": b"a = 1\n" * number}, START + timedelta(days=number))
    blob = git(folder, "rev-parse", "HEAD:a.py")
    damage(folder / ".git", blob)

    result = run_demo_process(data, "--out", tmp_path, folder)

    assert result.code == 1, result
    assert result.err.splitlines() == [
        f"broken {head[:8]} failed: repository {folder}/.git: object {blob} is missing or damaged"
    ]
    summary = dict(line.split() for line in result.out.splitlines() if len(line.split()) == 2)
    recovered = summary.pop("recovered")
    assert recovered in {"1", "2", "3"}
    assert summary == {"jobs": "3", "completed": "2", "failed": "1", "lost": "0"}
    assert f"killed with SIGKILL while it owned {recovered} job" in result.out


def test_no_repository_is_wrong_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refusal(capsys, tmp_path) == (2, f"no git repository at {tmp_path} or in a folder above it")
    assert refusal(capsys, tmp_path / "none") == (2, f"{tmp_path}/none does not exist or is no folder")


def test_an_empty_repository_is_wrong_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "empty")

    assert refusal(capsys, folder) == (2, f"repository {folder} has no commits: HEAD names none")


def test_a_broken_history_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "broken")
    first = commit(folder, {"a.py": b"a = 1\n"})
    commit(folder, {"a.py": b"a = 2\n"})
    object_file(folder / ".git", first).unlink()

    assert refusal(capsys, folder) == (1, f"repository {folder}: object {first} is missing or damaged")


def test_a_missing_git_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert refusal(capsys, tmp_path) == (1, "git is not installed or not on the PATH")


def test_folders_that_cannot_be_used_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], project: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()

    code, line = refusal(capsys, project, "--out", file)
    assert (code, line) == (1, f"folder {file} cannot be used: File exists")
    code, line = refusal(capsys, project, "--data", file)
    assert (code, line) == (1, f"folder {file}/logs cannot be used: Not a directory")


def test_two_demos_do_not_share_a_data_folder(
    capsys: pytest.CaptureFixture[str], project: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with (data / "demo.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, line = refusal(capsys, project, "--data", data)

    assert (code, line.partition(":")[0]) == (1, f"another demo runs in {data}")


def test_data_lies_in_the_users_cache_unless_another_folder_is_given(
    capsys: pytest.CaptureFixture[str], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jsworker").touch()

    code, line = refusal(capsys, project)

    assert (code, line) == (1, f"folder {tmp_path}/jsworker/demo/logs cannot be used: Not a directory")
