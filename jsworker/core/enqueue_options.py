"""The options of a job when it is enqueued."""

from datetime import datetime

from typing_extensions import TypedDict

from jsworker.core.priorities import Priority
from jsworker.core.processor import Seconds, Unique


class EnqueueOptions(TypedDict, total=False):
    """The keyword options of an enqueue call, which apply to each job that it enqueues.

    Attributes:
        delay: seconds, or a timedelta, until the job is due.
        max_attempts: overrides the processor's; at most 1,000,000.
        max_stalls: overrides the processor's; at most 100. After two the job runs in quarantine.
        limit_key: the key under which limits, rates and pauses count the job, 1 to 255 printable characters;
            left out: the key by the ``limit`` or ``rate`` of the processor, if a processor is given.
        priority: ``high``, ``normal`` or ``low``; left out: the processor's, or normal for a kind's name.
        run_at: when the job is due, instead of a delay: a datetime with a time zone. A past time means now.
        expires_in: seconds, or a timedelta, from the call; a job that has not begun by then is cancelled.
            The job begins with its first claim: if it is retried or taken back later, it does not expire.
            Overrides the processor's.
        unique: the rule for the unique key: ``live`` (the default), at most one job waits or runs;
            ``waiting``, at most one waits and one runs. Overrides the processor's.
        unique_for: seconds, or a timedelta, in which at most one job of the unique key is enqueued; ended
            jobs count too. None is enqueued while one waits or runs. Overrides the processor's.
        debounce: seconds, or a timedelta, until the job is due. At most one job of the unique key waits and
            one runs; each further call replaces the payload of the waiting job and begins its wait anew.
        debounce_max: seconds, or a timedelta, from the first of these calls: the job is due by then.
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
