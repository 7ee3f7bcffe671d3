import sys
from pathlib import Path

import pytest

from jsworker.core.errors import InvalidTarget, UsageError
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import load_settings
from jsworker.core.targets import load_named, load_processor, load_processor_class
from jsworker.worker.pipeline.kinds import processor_at, resolve_kinds

from .commands import Cli

REFUSALS = {
    "cli_jobs": "target 'cli_jobs' must read MODULE:CLASS, for example my_jobs:AnalyzeRepo",
    "cli_jobs:": "target 'cli_jobs:' must read MODULE:CLASS",
    ":Double": "target ':Double' must read MODULE:CLASS",
    ".cli_jobs:Double": "target '.cli_jobs:Double' must read MODULE:CLASS",
    "cli_jobs:Double(1)": "target 'cli_jobs:Double(1)' must read MODULE:CLASS",
    "cli_jobs:a_number()": "target cli_jobs:a_number() cannot be called: it is of type int",
    "factories:broken()": "target factories:broken() raised ValueError: no server ({here}/factories.py",
    "factories:later()": "factories:later() is a coroutine function: open what it awaits in setup()",
    "factories:numbers()": "target factories:numbers() is no JobProcessor: it is of type int",
    "factories:numbers": "target factories:numbers is no JobProcessor: write factories:numbers() for what it",
    "factories:undecorated": "factories:undecorated is no JobProcessor: @job makes one of a function",
    "./cli_jobs.py:Double": "AnalyzeRepo; write the module without .py",
    "./cli_jobs.py": "AnalyzeRepo; write the module without .py",
    "nowhere:Double": "target nowhere:Double: there is no module nowhere in {here} or on the Python path",
    "nowhere.at.all:Double": "target nowhere.at.all:Double: there is no module nowhere in ",
    "needy:Double": "ModuleNotFoundError: No module named 'not_installed' ({here}/needy.py, line 1)",
    "half:Double": "module half cannot be imported: ImportError: cannot import name 'Nothing' from",
    "untidy:Double": "module untidy cannot be imported: SyntaxError: ",
    "script:Double": "module script cannot be imported: SystemExit: 3 ({here}/script.py, line 2)",
    "cli_jobs:Triple": "target cli_jobs:Triple: module cli_jobs has no Triple",
    "cli_jobs:Outer.Outest": "target cli_jobs:Outer.Outest: class Outer has no Outest",
    "cli_jobs:Numbers": "target cli_jobs:Numbers is no JobProcessor: it is another class",
    "cli_jobs:a_number": "target cli_jobs:a_number is no JobProcessor: it is of type int",
    "cli_jobs:Unfinished": "target cli_jobs:Unfinished is abstract: it must define process",
    "cli_jobs:JobProcessor": "target cli_jobs:JobProcessor is abstract: it must define process",
    "cli_jobs:Demanding": "target cli_jobs:Demanding cannot be made: TypeError: ",
}

FACTORIES = """
from cli_jobs import Demanding, Double

def broken():
    raise ValueError("no server")

async def later():
    return Double()

def numbers():
    return 42

async def undecorated(payload):
    return payload

def demanding():
    print("one more line that is no JSON")
    return Demanding("a thing")
"""


@pytest.fixture(autouse=True)
def _modules(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    (here / "needy.py").write_text("import not_installed\n")
    (here / "half.py").write_text("from cli_jobs import Nothing\n")
    (here / "untidy.py").write_text("class Double:\n  def\n")
    (here / "factories.py").write_text(FACTORIES)
    (here / "script.py").write_text("import sys\nsys.exit(3)\n")


@pytest.mark.parametrize("target", sorted(REFUSALS.keys() - {"cli_jobs:Demanding"}))
def test_what_cannot_be_used_is_named_with_its_cause(target: str, here: Path) -> None:
    with pytest.raises(InvalidTarget) as refusal:
        load_processor(target)
    assert REFUSALS[target].format(here=here) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("target", ["script:Double", "cli_jobs:Demanding"])
def test_a_worker_ends_with_the_cause_as_its_last_line(target: str, cli: Cli, here: Path) -> None:
    found = cli("run", target)
    assert (found.code, found.out) == (2, "")
    assert REFUSALS[target].format(here=here) in found.errors[-1]
    assert "Traceback" not in found.err


@pytest.mark.parametrize("target", ["cli_jobs:Double", "cli_jobs:made", "cli_jobs:Outer.Inner"])
def test_a_class_an_instance_and_a_nested_class_are_processors(target: str) -> None:
    name = "inner" if target.endswith("Inner") else "double"
    assert load_processor(target).kind == name
    assert load_processor_class(target).kind == name


@pytest.mark.parametrize(
    ("preload", "line"),
    [
        (
            "nowhere",
            "target of JSWORKER_PRELOAD=nowhere: there is no module nowhere in {here} or on the Python path",
        ),
        ("cli_jobs, script", "module script cannot be imported: SystemExit: 3 ({here}/script.py, line 2)"),
        ("cli-jobs", "JSWORKER_PRELOAD='cli-jobs' must be a comma list of modules"),
    ],
)
def test_modules_to_preload_that_cannot_be_imported_are_named(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, preload: str, line: str
) -> None:
    monkeypatch.setenv("JSWORKER_PRELOAD", preload)
    found = cli("run", "cli_jobs:Double")
    assert (found.code, found.out) == (2, "")
    assert line.format(here=here) in found.errors[-1]


def test_a_factory_is_called_for_each_process(here: Path) -> None:
    made = load_processor("factories:demanding()")
    assert isinstance(made, JobProcessor)
    assert made.kind == "demanding"
    assert made is not load_processor("factories:demanding()")
    assert load_processor_class("factories:demanding()").kind == "demanding"
    assert load_processor("cli_jobs:Double()").kind == "double"


def test_a_processor_of_a_factory_can_be_made_by_another_process(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    [kind] = resolve_kinds([load_processor("factories:demanding()")], load_settings()).values()
    assert kind.origin == "factories:demanding()"
    assert processor_at(kind.origin).needed == "a thing"  # type: ignore[attr-defined]  # of a module of the test


def test_the_working_directory_is_on_the_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(here)])
    assert load_processor("cli_jobs:Double").kind == "double"
    assert sys.path[0] == str(here)


def test_a_working_directory_that_was_deleted_is_told_in_one_line(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    line = "the working directory cannot be found: No such file or directory"
    assert cli("run", "cli_jobs:Double").refused(2) == line
    assert cli("run", "cli_jobs:Double", "--reload").refused(2) == line
    with pytest.raises(UsageError, match=line):
        load_processor("cli_jobs:Double")


def test_what_a_module_prints_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    load_processor("cli_jobs:Double")
    assert capsys.readouterr() == ("", "this line is no JSON\n")


def test_a_long_cause_is_cut(here: Path) -> None:
    (here / "chatty.py").write_text("raise RuntimeError('x' * 10_000)\n")
    with pytest.raises(InvalidTarget) as refusal:
        load_processor("chatty:Double")
    assert len(str(refusal.value)) < 800


def test_two_processors_of_one_kind_are_refused(cli: Cli) -> None:
    found = cli("run", "cli_jobs:Double", "cli_jobs:Double2")
    both = "kind double has two processors, cli_jobs:Double and cli_jobs:Double2"
    assert (found.code, found.errors[-1]) == (2, f"{both}: give one of them another `kind`")


def test_a_kinds_own_threshold_must_fit_the_settings(cli: Cli) -> None:
    found = cli("run", "cli_jobs:Patient")
    rule = "must exceed stale_threshold=1000 of kind patient + 2 × JSWORKER_SCAN_INTERVAL=5"
    assert (found.code, found.errors[-1]) == (2, f"JSWORKER_ACK_WAIT=600 {rule}")


def test_a_module_of_contrib_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jsworker.contrib.sentry", raising=False)
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)  # as if it were not installed
    with pytest.raises(InvalidTarget, match=r"sentry_sdk.*; pip install 'jsworker\[sentry\]'$"):
        load_named("jsworker.contrib.sentry:sentry_scope", "NAME", "my_jobs:around")


def test_a_module_of_the_users_that_one_of_contrib_does_not_find_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'site_settings'", name="site_settings")

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(InvalidTarget, match=r"No module named 'site_settings' \(\S+, line \d+\)$"):
        load_named("jsworker.contrib.django.setup:x", "NAME", "my_jobs:around")
