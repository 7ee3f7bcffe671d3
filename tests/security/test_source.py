"""What the source does not hold: unpickling, code from messages, SQL put together while the program runs."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.guarded import ROOT

SOURCES = sorted([*(ROOT / "jsworker").rglob("*.py"), *(ROOT / "alembic").rglob("*.py")])

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "yaml",
    "runpy",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}

IMPORTS_BY_NAME = {
    "jsworker/__init__.py": "a table of this file: parts of the package, when they are asked for",
    "jsworker/client/__init__.py": "likewise",
    "jsworker/testing/__init__.py": "likewise",
    "jsworker/cli/app.py": "likewise: the commands",
    "jsworker/core/lean_imports.py": "a constant of the next and of lean_structlog.py",
    "jsworker/stream/lean_nats.py": "constants",
    "jsworker/core/targets.py": "what stands on the command line",
    "jsworker/worker/pipeline/kinds.py": "where the worker has its processor from",
    "jsworker/contrib/django/management/commands/jsworker_run.py": "of apps of the settings",
    "jsworker/contrib/django/tasks.py": "a row's, but of those apps alone",
}
"""Whoever imports by name, and whose name that is: none of a message, and of a row Django's alone."""

SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|COPY|CREATE|ALTER|DROP|GRANT|REVOKE|TRUNCATE|SET|CALL)\s"
)
WILDCARDS = re.compile(r"\b(I?LIKE|SIMILAR\s+TO)\b")
SQL_LIBRARIES = {"sqlalchemy", "psycopg", "alembic"}
EXECUTES = {"execute", "executemany", "exec_driver_sql", "scalar", "scalars", "copy", "text"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with the last part of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name, node


def is_put_together(node: ast.expr) -> bool:
    """Tell whether a text is made of parts: f-string, +, %, format, replace, join."""
    match node:
        case ast.JoinedStr():
            return any(isinstance(part, ast.FormattedValue) for part in node.values)
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Attribute(attr="format" | "replace" | "join" | "format_map")):
            return True
    return False


def run_time_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions that are not only called while the module is imported."""
    at_import = {
        name
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name, _ in calls(statement)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    later = {name for function in functions for name, _ in calls(function)}
    for function in functions:
        if not (function.name in at_import - later and function.name.startswith("_")):
            yield function


def unsafe_calls(path: Path) -> Iterator[str]:
    """Yield what unpickles, evaluates, or imports by a name of unknown origin."""
    tree = tree_of(path)
    yield from sorted(FORBIDDEN_MODULES & set(imported(tree)))
    called = {name for name, call in calls(tree) if isinstance(call.func, ast.Name)}
    yield from sorted(FORBIDDEN_CALLS & called)
    if name_of(path) not in IMPORTS_BY_NAME:
        yield from (name for name, _ in calls(tree) if name in {"import_module", "import_string"})


def built_statements(path: Path) -> Iterator[str]:
    """Yield SQL that is put together while the program runs."""
    tree = tree_of(path)
    if "subprocess" in set(imported(tree)) and "psql" in path.read_text():
        yield "a statement for psql"
    if not SQL_LIBRARIES & set(imported(tree)):
        return
    for function in run_time_functions(tree):
        for name, call in calls(function):
            statement = call.args[0] if name in EXECUTES and call.args else None
            if statement and is_put_together(statement) and not is_made_of_constants(statement):
                yield ast.unparse(call)
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr | ast.BinOp) and is_put_together(node):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                if any(isinstance(part, str) and SQL.match(part) for part in parts):
                    yield ast.unparse(node)


def is_made_of_constants(node: ast.expr) -> bool:
    """Tell whether it is one of the module's statements with a constant in place of a constant."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() | ast.Attribute(), attr="replace"), args=arguments):
            return all(isinstance(each, ast.Constant) for each in arguments)
    return False


def searches_by_pattern(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WILDCARDS.search(node.value):
            yield node.value


def loggers_of_users(path: Path) -> Iterator[str]:
    """Yield calls for structlog's logger, whose configuration a user's code may replace."""
    if name_of(path) != "jsworker/telemetry/logs.py":
        yield from (name for name, _ in calls(tree_of(path)) if name == "get_logger")


Look = Callable[[Path], Iterator[str]]


def found(look: Look) -> dict[str, list[str]]:
    what = {name_of(path): list(look(path)) for path in SOURCES}
    return {name: lines for name, lines in what.items() if lines}


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 100
    assert set(IMPORTS_BY_NAME) <= {name_of(path) for path in SOURCES}


def test_nothing_is_unpickled_evaluated_or_imported_by_a_strangers_name() -> None:
    assert found(unsafe_calls) == {}


def test_no_sql_is_put_together_while_the_program_runs() -> None:
    assert found(built_statements) == {}


def test_no_statement_searches_by_pattern() -> None:
    assert found(searches_by_pattern) == {}


def test_no_line_is_written_by_a_logger_that_users_configure() -> None:
    assert found(loggers_of_users) == {}


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (unsafe_calls, "import pickle"),
        (unsafe_calls, "from yaml import load"),
        (unsafe_calls, "eval('1')"),
        (unsafe_calls, "import_module(kind)"),
        (unsafe_calls, "importlib.import_module(kind)"),
        (unsafe_calls, "import_string(kind)"),
        (built_statements, "def f(n):\n    execute(f'SELECT {n}')"),
        (built_statements, "def f(n):\n    execute('SELECT ' + n)"),
        (built_statements, "def f(n):\n    execute('SELECT %s' % n)"),
        (built_statements, "def f(n):\n    text('SELECT {}'.format(n))"),
        (built_statements, "def f(n):\n    text(STATEMENT.replace('{}', n))"),
        (
            built_statements,
            "def f(n):\n    statement = f'DELETE FROM jobs WHERE id = {n}'\n    run(statement)",
        ),
        (loggers_of_users, "structlog.get_logger().info('x')"),
        (searches_by_pattern, "S = \"SELECT id FROM workers WHERE id LIKE 'pod-1%'\""),
    ],
)
def test_these_tests_find_what_they_look_for(
    look: Look, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.security.test_source.ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text(f"import sqlalchemy\n{source}\n")
    assert list(look(bad))
