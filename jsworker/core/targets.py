"""Targets ``MODULE:NAME`` and ``MODULE``, which name processors of the user's own code.

Modules are found in the working directory too. ``NAME`` is a processor's class, a processor, or
``FACTORY()``, which is called without arguments and returns a processor.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from jsworker.core.errors import InvalidTarget, UsageError
from jsworker.core.names import printable, shown
from jsworker.core.processor import JobProcessor
from jsworker.core.tracebacks import raised_at

_TARGET = re.compile(
    r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<names>[^\W\d]\w*(\.[^\W\d]\w*)*)(?P<call>\(\))?"
)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_LONGEST_CAUSE = 500
_CONTRIB: Final = "jsworker.contrib."
"""Each module there needs the extra of its name."""
_MADE_BY: Final = "jsworker made it by"


def load_processors(target: str) -> list[JobProcessor[Any] | type[JobProcessor[Any]]]:
    """Return the processor of a target ``MODULE:CLASS``, or all those of a ``MODULE``.

    The processors of a module are the classes that are defined in it or, if it is a package, in its modules,
    and those that its ``__all__`` names. Classes that are abstract, or whose names begin with an underscore,
    are left out. An instance is returned in place of its class.

    Raises InvalidTarget when it cannot be imported, or has no processor that can be used.
    """
    found, abstract = _search(target)
    if not found:
        fault = f"target {target}: module {target} defines no JobProcessor"
        reason = f" that can run: {'; '.join(map(_lacks, abstract))}" if abstract else _hidden_by(target)
        raise InvalidTarget(f"{fault}{reason}")
    return found


def find_processors(target: str) -> list[JobProcessor[Any] | type[JobProcessor[Any]]]:
    """Do as ``load_processors``, but return an empty list for a module that defines none."""
    return _search(target)[0]


def unfinished_processors(target: str) -> list[str]:
    """Return a line for each abstract class of a module that has no subclass: the methods that it lacks."""
    if _MODULE.fullmatch(target) is None:
        return []
    return [_lacks(cls) for cls in _search(target)[1] if not cls.__subclasses__()]


def _search(
    target: str,
) -> tuple[list[JobProcessor[Any] | type[JobProcessor[Any]]], list[type[JobProcessor[Any]]]]:
    """Return the processors of a target, and the abstract classes that its module defines."""
    if _MODULE.fullmatch(target) is None:
        return [load_processor(target)], []
    module = _import(target, target)
    found: dict[type[JobProcessor[Any]], JobProcessor[Any] | type[JobProcessor[Any]]] = {}
    abstract: dict[type[JobProcessor[Any]], None] = {}
    for each in _modules_of(target, module):
        exported = getattr(each, "__all__", ()) if each is module else ()
        for name, value in vars(each).items():
            cls = value if isinstance(value, type) else type(value)
            if not issubclass(cls, JobProcessor):
                continue
            is_public = not name.startswith("_") and cls.__module__ == each.__name__
            if inspect.isabstract(cls):
                if is_public:
                    abstract[cls] = None
            elif (is_public or name in exported) and not isinstance(found.get(cls), JobProcessor):
                found[cls] = value
    return list(found.values()), list(abstract)


def _lacks(cls: type[JobProcessor[Any]]) -> str:
    missing = ", ".join(sorted(cls.__abstractmethods__))
    return f"{cls.__module__}:{cls.__qualname__} is abstract, it must define {missing}"


def _modules_of(target: str, module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module and, if it is a package, the modules in it, but not ``__main__``, which would run."""
    yield module
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        if not info.name.endswith(".__main__"):
            yield _import(target, info.name)


def load_processor(target: str) -> JobProcessor[Any] | type[JobProcessor[Any]]:
    """Return the processor of a target, or its class, of which the worker can make new instances.

    Raises InvalidTarget when it cannot be imported, or is no processor that can be used.
    """
    found = _load(target)
    if isinstance(found, type) and inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise InvalidTarget(f"target {target} is abstract: it must define {missing}")
    return found


def load_processor_class(target: str) -> type[JobProcessor[Any]]:
    """Return the processor class of a target; a factory is called to learn it."""
    found = _load(target)
    return found if isinstance(found, type) else type(found)


def load_named(target: str, what: str, example: str) -> Any:
    """Return what a target names or, with ``()``, its result; InvalidTarget: it cannot be read or loaded."""
    parts = _TARGET.fullmatch(target)
    if parts is None:
        advice = "; write the module without .py" if ".py:" in f"{target}:" else ""
        raise InvalidTarget(f"target {shown(target)} must read MODULE:{what}, for example {example}{advice}")
    found: Any = _import(target, parts["module"])
    for name in parts["names"].split("."):
        if not hasattr(found, name):
            owner = "module" if isinstance(found, ModuleType) else "class"
            fault = f"target {target}: {owner} {found.__name__} has no {name}"
            raise InvalidTarget(f"{fault}{_hidden_by(parts['module'])}")
        found = getattr(found, name)
    return _call(target, found) if parts["call"] else found


def _hidden_by(name: str) -> str:
    """Return in words which module was imported in place of one of the working directory; "": none was."""
    name = name.partition(".")[0]
    own = PathFinder.find_spec(name, [str(working_directory())])
    imported = getattr(sys.modules[name], "__file__", None)
    if own is None or own.origin is None or imported is None:
        return ""
    if os.path.realpath(imported) == os.path.realpath(own.origin):
        return ""
    return f"; it is {imported}, which hides {own.origin}: rename yours"


def import_modules(names: str) -> None:
    """Import the modules of a comma list, one after the other; InvalidTarget: one cannot be imported."""
    for name in filter(None, map(str.strip, names.split(","))):
        _import(f"of JSWORKER_PRELOAD={name}", name)


def factory_of(processor: JobProcessor[Any]) -> str | None:
    """Return the target of the factory that has made a processor here; None: none has."""
    made_by: str | None = vars(processor).get(_MADE_BY)
    return made_by


def working_directory() -> Path:
    """Return the working directory; UsageError: it was deleted, or this user may not find it."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory cannot be found: {error.strerror}") from None


def _load(target: str) -> JobProcessor[Any] | type[JobProcessor[Any]]:
    found = load_named(target, "CLASS", "my_jobs:AnalyzeRepo")
    if isinstance(found, JobProcessor):
        if target.endswith("()"):
            vars(found)[_MADE_BY] = target
        return found
    if isinstance(found, type) and issubclass(found, JobProcessor):
        return found
    if inspect.isfunction(found):
        advice = f"write {target}() for what it returns"
        try:
            inspect.signature(found).bind()
        except TypeError:  # no factory, then: it takes a payload
            advice = "@job makes one of a function"
        raise InvalidTarget(f"target {target} is no JobProcessor: {advice}")
    what = "another class" if isinstance(found, type) else f"of type {type(found).__name__}"
    raise InvalidTarget(f"target {target} is no JobProcessor: it is {what}")


def _call(target: str, factory: Any) -> Any:
    if inspect.iscoroutinefunction(factory):
        raise InvalidTarget(f"target {target} is a coroutine function: open what it awaits in setup()")
    if not callable(factory):
        raise InvalidTarget(f"target {target} cannot be called: it is of type {type(factory).__name__}")
    try:
        with redirect_stdout(sys.stderr):
            return factory()
    except (Exception, SystemExit) as error:
        raise InvalidTarget(f"target {target} raised {_cause(error)}") from error


def _import(target: str, name: str) -> ModuleType:
    if name.endswith(".py") and Path(name).is_file():
        module = name.removesuffix(".py")
        raise InvalidTarget(f"target {target}: write the module, {module}, not the file {name}")
    here = str(working_directory())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for what the command itself says
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            parent, _, attribute = error.name.rpartition(".")
            advice = ""
            if name == target and parent in sys.modules and attribute in vars(sys.modules[parent]):
                advice = f"; write {parent}:{name.removeprefix(f'{parent}.')}"
            raise InvalidTarget(
                f"target {target}: there is no module {error.name} in {here} or on the Python path{advice}"
            ) from error
        fault: BaseException = error
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code; raised below as another
        fault = error
    cause = _cause(fault)
    extra = name.removeprefix(_CONTRIB).partition(".")[0]
    missing = str(fault.name) if isinstance(fault, ModuleNotFoundError) else ""
    if name.startswith(_CONTRIB) and missing.startswith(extra):  # not a module of the user's settings
        cause = f"{cause}; pip install 'jsworker[{extra}]'"
    raise InvalidTarget(f"target {target}: module {name} cannot be imported: {cause}") from fault


def _cause(fault: BaseException) -> str:
    """Return the last line of an error, and where it was raised."""
    cause = printable(traceback.format_exception_only(fault)[-1].strip(), _LONGEST_CAUSE)
    return f"{cause} ({place})" if (place := raised_at(fault)) else cause
