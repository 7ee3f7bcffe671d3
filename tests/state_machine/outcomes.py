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
    "retry": ["not failed", "taken", "unique key taken"],
    "orphaned claims": ["found", "none"],
    "taken back": ["cancelled", "failed", "queued", "scheduled"],
}

OUTCOMES = frozenset(
    f"{what}: {outcome}" if outcome else what for what, outcomes in _MET.items() for outcome in outcomes
)
"""For an outcome that was not met the run goes on beyond its usual length."""
