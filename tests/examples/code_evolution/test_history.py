import os
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from code_evolution import git as quiet_git
from code_evolution.git import GitError, NoRepository
from code_evolution.history import (
    EVEN_SAMPLES,
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    Commit,
    open_repository,
    sample,
)

from .repositories import (
    START,
    commit,
    damage,
    every,
    git,
    new_repository,
    object_file,
    repository_with_dates,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = new_repository(tmp_path / "project")
    commit(folder, {"src/a.py": b"a = 1\n"})
    return folder


class TestOpenRepository:
    @pytest.mark.parametrize("inside", [".", "src", ".git", ".git/refs"])
    def test_opens_a_work_tree_from_any_folder_in_it(self, repository: Path, inside: str) -> None:
        opened = open_repository(repository / inside)

        assert opened.path == repository
        assert opened.git_dir == repository / ".git"
        assert opened.commits[-1].id == git(repository, "rev-parse", "HEAD")
        assert opened.name == "project"
        assert not opened.shallow

    @pytest.mark.parametrize("inside", [".", "objects"])
    def test_opens_a_bare_repository(self, repository: Path, tmp_path: Path, inside: str) -> None:
        bare = tmp_path / "mirror.git"
        git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(bare))

        opened = open_repository(bare / inside)

        assert (opened.path, opened.git_dir, opened.name) == (bare, bare, "mirror")

    def test_opens_a_linked_work_tree_at_its_own_head(self, repository: Path, tmp_path: Path) -> None:
        linked = tmp_path / "linked"
        git(repository, "worktree", "add", "--quiet", "--detach", str(linked))
        own = commit(linked, {"b.py": b"b = 1\n"})

        opened = open_repository(linked)

        assert (opened.path, opened.commits[-1].id, opened.name) == (linked, own, "linked")

    def test_opens_a_relative_path_that_looks_like_an_option(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(new_repository(tmp_path / "--help"), {"a.py": b"1\n"})
        monkeypatch.chdir(tmp_path)

        assert open_repository("--help").path == tmp_path / "--help"

    @pytest.mark.parametrize("name", ["ünï cödé", "two\nlines", "end ", "$HOME;ls"])
    def test_opens_folders_with_any_characters(self, tmp_path: Path, name: str) -> None:
        commit(new_repository(tmp_path / name), {"a.py": b"1\n"})

        opened = open_repository(tmp_path / name)

        assert opened.path == tmp_path / name
        assert opened.name.isprintable()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
    def test_opens_a_repository_of_another_owner(self, repository: Path) -> None:
        subprocess.run(["chown", "-R", "65534", str(repository)], check=True)
        with_default_trust = subprocess.run(
            ["git", "-C", str(repository), "rev-parse", "HEAD"],
            env={"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
            capture_output=True,
            check=False,
        )

        opened = open_repository(repository / "src")

        assert b"dubious ownership" in with_default_trust.stderr
        assert opened.history == len(opened.commits) == 1

    def test_looks_where_it_was_told_to_and_not_where_the_environment_points(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(new_repository(tmp_path / "other"), {"a.py": b"1\n"})
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
        monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))

        assert open_repository(repository).path == repository

    def test_refuses_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NoRepository, match=r"/nowhere does not exist or is no folder$"):
            open_repository(tmp_path / "nowhere")

    def test_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")

        with pytest.raises(NoRepository, match=r"/file does not exist or is no folder$"):
            open_repository(tmp_path / "file")

    def test_refuses_a_folder_outside_any_repository(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

        with pytest.raises(NoRepository) as refusal:
            open_repository(tmp_path)

        assert str(refusal.value) == f"no git repository at {tmp_path} or in a folder above it"

    def test_refuses_a_repository_without_commits(self, tmp_path: Path) -> None:
        empty = new_repository(tmp_path / "empty")

        with pytest.raises(NoRepository) as refusal:
            open_repository(empty)

        assert str(refusal.value) == f"repository {empty} has no commits: HEAD names none"

    def test_refuses_a_branch_without_commits(self, repository: Path) -> None:
        git(repository, "symbolic-ref", "HEAD", "refs/heads/unborn")

        with pytest.raises(NoRepository, match=r"has no commits: HEAD names none$"):
            open_repository(repository)

    def test_names_a_head_commit_that_is_missing(self, repository: Path) -> None:
        head = git(repository, "rev-parse", "HEAD")
        object_file(repository / ".git", head).unlink()

        with pytest.raises(GitError) as refusal:
            open_repository(repository)

        assert str(refusal.value) == f"repository {repository}: object {head} is missing or damaged"

    def test_refuses_a_damaged_reference_in_one_line(self, repository: Path) -> None:
        (repository / ".git/refs/heads/main").write_text("no object id\n")

        with pytest.raises(GitError, match="HEAD names none") as refusal:
            open_repository(repository)

        assert "\n" not in str(refusal.value)

    def test_refuses_a_path_that_no_job_can_store(self, tmp_path: Path) -> None:
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
        commit(new_repository(folder), {"a.py": b"1\n"})

        with pytest.raises(NoRepository, match="must be UTF-8"):
            open_repository(folder)

    def test_says_when_git_is_not_installed(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(GitError, match="git is not installed or not on the PATH"):
            open_repository(repository)

    def test_says_when_git_cannot_be_started(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "git").write_text("#!/nonexistent\n")
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(GitError, match="git cannot be started: Permission denied"):
            open_repository(repository)


class TestFirstParentHistory:
    def test_lists_the_main_line_oldest_first_in_utc(self, repository: Path) -> None:
        first = git(repository, "rev-parse", "HEAD")
        git(repository, "checkout", "--quiet", "-b", "side")
        commit(repository, {"side.py": b"1\n"}, date=datetime(2021, 2, 1, tzinfo=UTC))
        git(repository, "checkout", "--quiet", "main")
        second = commit(repository, {"main.py": b"1\n"}, date=datetime(2021, 3, 1, tzinfo=UTC))
        merged_at = datetime(2021, 4, 1, tzinfo=UTC)
        git(repository, "merge", "--quiet", "--no-ff", "--message", "merge", "side", date=merged_at)
        merge = git(repository, "rev-parse", "HEAD")

        assert open_repository(repository).commits == [
            Commit(first, START),
            Commit(second, datetime(2021, 3, 1, tzinfo=UTC)),
            Commit(merge, merged_at),
        ]

    def test_works_with_what_a_shallow_clone_has(self, tmp_path: Path) -> None:
        origin = repository_with_dates(tmp_path / "origin", every(1, 10))
        git(tmp_path, "clone", "--quiet", "--depth=3", f"file://{origin}", "shallow")

        opened = open_repository(tmp_path / "shallow")

        assert opened.shallow
        assert [each.date for each in opened.commits] == every(1, 10)[-3:]

    @pytest.mark.parametrize("harm", ["missing", "damaged"])
    def test_names_a_commit_that_cannot_be_read(self, repository: Path, harm: str) -> None:
        first = git(repository, "rev-parse", "HEAD")
        commit(repository, {"b.py": b"1\n"})
        if harm == "missing":
            object_file(repository / ".git", first).unlink()
        else:
            damage(repository / ".git", first)

        with pytest.raises(GitError) as refusal:
            open_repository(repository)

        assert str(refusal.value) == f"repository {repository}: object {first} is missing or damaged"

    def test_a_date_that_no_calendar_holds_stops_at_its_end(self, tmp_path: Path) -> None:
        folder = new_repository(tmp_path / "far")
        stream = b"commit refs/heads/main\ncommitter Ada <a@b> 99999999999999 +0000\ndata 1\n.\n"
        git(folder, "fast-import", "--quiet", stdin=stream)

        (only,) = open_repository(folder).commits

        assert only.date.year == 9999


def commits(dates: list[datetime]) -> list[Commit]:
    return [Commit(f"{place:040x}", date) for place, date in enumerate(dates)]


class TestSample:
    @pytest.mark.parametrize("count", [1, 2, FEWEST_SAMPLES, EVEN_SAMPLES])
    def test_takes_every_commit_of_a_short_history(self, count: int) -> None:
        history = commits(every(0.01, count))

        assert sample(history) == history

    def test_takes_commits_at_even_distances_when_months_are_few(self) -> None:
        history = commits(every(1, 471))

        chosen = sample(history)

        places = [history.index(each) for each in chosen]
        assert len(chosen) == EVEN_SAMPLES
        assert {after - before for before, after in pairwise(places)} == {10}

    def test_takes_the_last_commit_of_each_month_of_a_long_history(self) -> None:
        history = commits(every(3, 400))

        first, *others = sample(history)

        assert first == history[0]
        assert others[-1] == history[-1]
        months = [(each.date.year, each.date.month) for each in others]
        assert months == sorted({(each.date.year, each.date.month) for each in history})
        for each in others[:-1]:
            successor = history[history.index(each) + 1]
            assert successor.date.month != each.date.month

    def test_thins_what_is_too_much(self) -> None:
        history = commits(every(15, 1000))

        chosen = sample(history)

        assert len(chosen) == MOST_SAMPLES == len(set(chosen))
        assert (chosen[0], chosen[-1]) == (history[0], history[-1])
        assert chosen == sorted(chosen, key=history.index)

    def test_one_wrong_clock_does_not_hide_the_months_after_it(self) -> None:
        dates = every(15, 100)
        dates[50] = datetime(2038, 1, 19, tzinfo=UTC)
        history = commits(dates)

        chosen = sample(history)

        assert history[50] in chosen
        assert len([each for each in chosen if each.date > dates[51]]) > FEWEST_SAMPLES // 2
        assert (chosen[0], chosen[-1]) == (history[0], history[-1])

    def test_at_least_24_jobs_whenever_there_are_as_many_commits(self) -> None:
        for count in range(FEWEST_SAMPLES, 400, 7):
            for days in (0.5, 20, 31, 200):
                assert len(sample(commits(every(days, count)))) >= FEWEST_SAMPLES


def test_git_answers_in_english_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("GIT_EXEC_PATH", "/opt/git")

    chosen = quiet_git.environment()

    assert chosen["LC_ALL"] == "C"
    assert chosen["GIT_TERMINAL_PROMPT"] == "0"
    assert chosen["GIT_EXEC_PATH"] == "/opt/git"
