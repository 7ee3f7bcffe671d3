"""Everything that the rules must have met at least once in a run of the machine."""

_MET = {
    "cancel": ["final", "requested", "was queued", "was scheduled"],
    "claim in flight": ["owner alive", "owner dead"],
    "claim stale": ["refused", "taken"],
    "claim": [
        "answer is late",
        "answer is lost",
        "answer is never sent",
        "no such job",
        "refused, final",
        "refused, live",
        "taken",
    ],
    "clear": ["not running", "owner was faster", "taken back"],
    "complete": ["answer lost", "completed", "lost", "again"],
    "crash": [""],
    "deliver": ["newer copy of a run in hand", "spent copy of a run in hand"],
    "enqueue many": ["created", "existing"],
    "enqueue": ["delayed", "existing", "queued"],
    "fail": ["answer lost", "cancelled", "failed", "lost", "scheduled", "again"],
    "heartbeat": ["alive", "cancelled", "completed", "lost"],
    "idle poll": ["nothing", "taken"],
    "in the end": ["cancelled", "completed", "failed"],
    "late": ["found"],
    "lost messages": ["found", "none"],
    "mark": ["older dispatch", "taken", "too late"],
    "message": ["duplicated", "forged", "lost"],
    "owner's write": ["rejected", "taken"],
    "promote": ["not due", "taken"],
    "publish": ["another publisher's turn", "answer lost", "not stored", "taken"],
    "read back": ["mine", "nothing"],
    "release": ["answer lost", "cancelled", "lost", "queued", "again"],
    "snooze": ["answer lost", "cancelled", "failed", "lost", "snoozed", "again"],
    "step": ["kept", "kept before"],
    "republish": ["has moved on", "taken"],
    "reset crashed": ["owner was faster", "taken back"],
    "reset dead": ["nothing", "taken back"],
    "reset stale": ["owner was faster", "taken back"],
    "retry": ["not to be retried", "was cancelled", "was failed", "unique key taken"],
    "orphaned claims": ["found", "none"],
    "taken back": ["cancelled", "failed", "queued", "scheduled"],
}

_MET_IN_FLOWS = {
    "admit": ["answer lost", "held", "held row taken", "nothing", "queued row left", "taken"],
    "add member": ["added", "rejected"],
    "batches": ["cancelled", "finished", "not finished", "woken"],
    "fire": ["fired", "too late"],
    "free": ["nothing", "taken"],
    "held by": ["limit", "paused", "rate"],
    "in the end": ["cancelled", "completed", "failed"],
    "limit": ["lowered", "raised"],
    "read back": ["mine"],
    "retry": ["taken"],
    "retry of a member": ["held again", "opened"],
    "wake": ["nothing", "woken"],
}


def _named(met: dict[str, list[str]]) -> frozenset[str]:
    return frozenset(
        f"{what}: {outcome}" if outcome else what for what, outcomes in met.items() for outcome in outcomes
    )


FLOW_OUTCOMES = _named(_MET_IN_FLOWS)
OUTCOMES = _named(_MET)
"""For an outcome that was not met the run goes on beyond its usual length."""
