"""``jsworker run MODULE``: all processors of a module or a package."""

import graphlib
import json
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jsworker.core.errors import InvalidTarget
from jsworker.core.targets import load_processors

from .commands import Cli, Spawn

CLASS = """
from jsworker import JobProcessor


class {name}(JobProcessor):
    def process(self, job):
        return 1
"""


@pytest.fixture(autouse=True)
def _modules(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "shop/__init__.py": "from elsewhere import *\n\nnothing = 1\n__all__ = ['Elsewhere', 'nothing']\n",
        "shop/__main__.py": "raise SystemExit('python -m shop')\n",
        "shop/orders.py": CLASS.format(name="Order")
        + dedent(
            """
            from abc import abstractmethod
            from elsewhere import Hidden
            from jsworker import job

            class Unfinished(JobProcessor):
                pass

            Incomplete = Unfinished

            class Base(JobProcessor):
                pass

            class _OfBase(Base):
                def process(self, job):
                    return 1

            class _Private(Order):
                kind = "private"

            Alias = Order

            @job
            def tidy_up(payload):
                return None
            """
        ),
        "shop/mail/__init__.py": "",
        "shop/mail/sending.py": CLASS.format(name="Send")
        + "    def __init__(self, host):\n        self.host = host\n\n\n"
        + "send = Send('localhost')\nagain = send\n",
        "elsewhere.py": CLASS.format(name="Elsewhere") + CLASS.format(name="Hidden"),
        "empty.py": "from elsewhere import Elsewhere\n",
        "misspelled.py": CLASS.format(name="SendMail").replace("process", "perform")
        + CLASS.format(name="SendText").replace("process", "run"),
        "graphlib.py": CLASS.format(name="Standard"),
        "broken/__init__.py": "",
        "broken/half.py": "def\n",
    }
    for name, text in modules.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    for name in {each.split("/")[0].removesuffix(".py") for each in modules} - {"graphlib"}:
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)


def kinds(target: str) -> list[str]:
    return sorted(each.kind for each in load_processors(target))


def test_those_of_a_package_are_all_that_its_modules_define() -> None:
    assert kinds("shop") == ["elsewhere", "order", "send", "tidy-up"]
    assert kinds("shop.orders") == ["order", "tidy-up"]
    [send] = load_processors("shop.mail")
    assert send.host == "localhost"  # type: ignore[union-attr]  # its instance, for its class cannot be made
    assert kinds("shop.orders:tidy_up") == ["tidy-up"]


REFUSALS = {
    "empty": "target empty: module empty defines no JobProcessor",
    "misspelled": "JobProcessor that can run: misspelled:SendMail is abstract, it must define process; ",
    "graphlib": f"defines no JobProcessor; it is {graphlib.__file__}, which hides {{here}}/graphlib",
    "graphlib:Standard": f"has no Standard; it is {graphlib.__file__}, which hides {{here}}/graphlib",
    "nowhere": "target nowhere: there is no module nowhere in ",
    "empty.py": "target empty.py: write the module, empty, not the file empty.py",
    "empty.py:SendMail": "target empty.py:SendMail: write the module, empty, not the file empty.py",
    "elsewhere.Hidden": "no module elsewhere.Hidden in {here} or on the Python path; write elsewhere:Hidden",
    "shop.orders.Order.Inner": "Order in {here} or on the Python path; write shop.orders:Order.Inner",
    "broken": "target broken: module broken.half cannot be imported: SyntaxError: ",
}


@pytest.mark.parametrize("target", REFUSALS)
def test_what_has_none_is_refused(target: str, here: Path) -> None:
    with pytest.raises(InvalidTarget) as refusal:
        load_processors(target)
    assert REFUSALS[target].format(here=here) in str(refusal.value)


def test_a_worker_is_refused_in_one_line(cli: Cli) -> None:
    found = cli("run", "broken")
    assert (found.code, found.out) == (2, "")
    assert REFUSALS["broken"] in found.errors[-1]
    assert "Traceback" not in found.err


def test_of_a_module_whose_classes_are_all_abstract_is_told_what_each_lacks() -> None:
    lack = "{} is abstract, it must define process"
    of_both = f"{lack.format('misspelled:SendMail')}; {lack.format('misspelled:SendText')}"
    says = f"target misspelled: module misspelled defines no JobProcessor that can run: {of_both}"
    with pytest.raises(InvalidTarget, match=f"^{says}$"):
        load_processors("misspelled")


def test_a_worker_serves_all_of_them(spawn: Spawn) -> None:
    worker = spawn("run", "shop", "--log-format", "json")
    started = json.loads(worker.read_errors_until("worker.started"))
    assert sorted(started["kinds"]) == ["elsewhere", "order", "send", "tidy-up"]
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0


def test_an_abstract_class_that_is_no_base_is_named_once(spawn: Spawn) -> None:
    worker = spawn("run", "shop.orders", "shop.mail", "--processes", "2", "--log-format", "json")
    lines: list[dict[str, Any]] = []
    while sum(line["event"] == "worker.started" for line in lines) < 2:
        lines.append(json.loads(worker.read_errors_until("{")))
    worker.signal(signal.SIGTERM)
    ended = worker.wait()
    [warning] = [line for line in lines if line["event"] == "processor.left_out"]
    assert warning["reason"] == "shop.orders:Unfinished is abstract, it must define process"
    assert (ended.code, "processor.left_out" in ended.err) == (0, False)
