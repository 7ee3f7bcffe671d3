"""The model of the protocol was compared with the SQL as it is now."""

import hashlib
import re
from pathlib import Path

from jsworker.ownership.transitions import (
    claim,
    control,
    heartbeat,
    publish,
    republish,
    reset,
    settle,
    snooze,
)

MODEL = Path(__file__).parents[1] / "model"

STATEMENTS = [
    publish.PUBLISH,
    publish.MARK,
    publish.PROMOTE,
    claim.CLAIM,
    claim.CLAIM_STALE,
    claim.READ_BACK,
    heartbeat.HEARTBEAT,
    heartbeat.ORPHANED,
    settle.COMPLETE,
    settle.FAIL,
    settle.RELEASE,
    snooze.SNOOZE,
    reset.RESET_STALE,
    reset.RESET_CRASHED,
    reset.RESET_DEAD,
    reset.RESET_BY_OPERATOR,
    control.CANCEL,
    control.RETRY,
    republish.REPUBLISH,
]


def test_no_statement_has_changed_since_the_model_was_compared_with_it() -> None:
    words = "\n".join(re.sub(r"\s+", " ", statement.text.strip()) for statement in STATEMENTS)
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    written = re.search(r"sha256 of the statements: (\w+)", (MODEL / "README.md").read_text())
    assert written is not None
    assert written[1] == digest, "compare the model as model/README.md says, then write the new sum"
