"""What may be said of a job when it is enqueued."""

from datetime import datetime

from typing_extensions import TypedDict

from jsworker.core.priorities import Priority
from jsworker.core.processor import Seconds, Unique


class EnqueueOptions(TypedDict, total=False):
    """What a call may say by keyword of each job that it enqueues.

    Attributes:
        delay: seconds, or a timedelta, until the job is due.
        max_attempts: overrides the processor's; at most 1,000,000.
        max_stalls: overrides the processor's; at most 100. After two the job runs in quarantine.
        limit_key: under which limits, rates and pauses count it, 1 to 255 printable characters; left out:
            what the ``limit`` or ``rate`` of a processor that is given says.
        priority: ``high``, ``normal`` or ``low``; left out: the processor's, or normal for a kind's name.
        run_at: when the job is due, instead of a delay: a datetime with a time zone. One that is over is now.
        expires_in: seconds, or a timedelta, from the insert; a job that has not begun by then is cancelled. A
            claim is a beginning: what is retried or taken back later does not expire. Overrides the
            processor's.
        unique: of the unique key: ``live`` (the default), at most one waits or runs; ``waiting``, at most one
            waits and one runs. Overrides the processor's.
        unique_for: seconds, or a timedelta: of the unique key at most one job is enqueued in so long, ended
            ones included, and none while it waits or runs. Overrides the processor's.
        debounce: seconds, or a timedelta, until the job is due. Of the unique key one waits and one runs;
            each further call replaces the payload of the one that waits, and lets it wait anew.
        debounce_max: seconds, or a timedelta, from the first of these calls: no later is it moved.
    """

    delay: Seconds
    max_attempts: int | None
    max_stalls: int | None
    limit_key: str | None
    priority: Priority | None
    run_at: datetime | None
    expires_in: Seconds | None
    unique: Unique | None
    unique_for: Seconds | None
    debounce: Seconds | None
    debounce_max: Seconds | None
