"""The models of the protocol were compared with the SQL as it is now."""

import hashlib
import re
from pathlib import Path

import pytest

from jsworker.ownership.transitions import (
    admission,
    claim,
    control,
    heartbeat,
    publish,
    reopen,
    republish,
    reset,
    schedules,
    settle,
    snooze,
    workflows,
)

MODEL = Path(__file__).parents[1] / "model"

STATEMENTS = {
    "ownership.pml": [
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
    ],
    "admission.pml": [
        admission.LOCK,
        admission.ADMIT,
        admission.LOCK_KEYS,
        admission.WAKE,
        admission.WAITING_KEYS,
    ],
    "schedules.pml": [schedules.FIRE, schedules.WRITE_CODE],
    "workflows.pml": [
        workflows.FINISH,
        workflows.NEEDS,
        workflows.PROPAGATED,
        workflows.LEFT,
        reopen.MOVE_ON,
        reopen.REOPEN,
        reopen.LOOK_AGAIN,
        reopen.RETRY_MEMBERS,
        reopen.HOLD_AGAIN,
    ],
}


@pytest.mark.parametrize("model", STATEMENTS)
def test_no_statement_has_changed_since_its_model_was_compared_with_it(model: str) -> None:
    words = "\n".join(re.sub(r"\s+", " ", statement.text.strip()) for statement in STATEMENTS[model])
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    written = re.search(
        rf"{re.escape(model)}: sha256 of the statements (\w+)", (MODEL / "README.md").read_text()
    )
    assert written is not None
    assert written[1] == digest, "compare the model as model/README.md says, then write the new sum"
