"""Read-only Django models of jobs: only jsworker's own statements, which have guards, change the rows."""

from typing import Any, NoReturn

from django.db import models


class StoredJson(models.JSONField):
    """JSON as Python reads it; what it does not read, such as numbers of thousands of digits, stays text."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the value, or the column's text."""
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):  # anybody with INSERT can have stored it; others' rows are fine
            return value


class ReadOnly(models.Model):
    """A row of one of jsworker's tables, which Django must not change."""

    class Meta:
        """Has no table."""

        abstract = True

    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("jobs are changed by a client of jsworker, not through Django's models")

    delete = save


class StoredJob(ReadOnly):
    """A job's row; columns that only the protocol needs are left out."""

    id = models.UUIDField(primary_key=True)
    kind = models.TextField()
    status = models.TextField()
    payload = StoredJson()
    result = StoredJson(null=True)
    unique_key = models.TextField(null=True)
    waiting_key = models.TextField(null=True)
    limit_key = models.TextField(null=True)
    priority = models.SmallIntegerField(choices=[(0, "high"), (1, "normal"), (2, "low")])
    attempts = models.IntegerField()
    errors = models.IntegerField()
    stalls = models.IntegerField()
    worker_id = models.TextField(null=True)
    completed_by = models.TextField(null=True)
    stage = models.TextField(null=True)
    progress = models.FloatField(null=True)
    message = models.TextField(null=True)
    last_error = models.TextField(null=True)
    failure_reason = models.TextField(null=True)
    held_by = models.TextField(null=True)
    created_at = models.DateTimeField()
    run_at = models.DateTimeField(null=True)
    scheduled_for = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    claimed_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        """Jsworker, not Django, creates the table."""

        managed = False
        db_table = 'jsworker"."jobs'
        verbose_name = "job"

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class StoredEvent(ReadOnly):
    """An entry in a job's timeline."""

    id = models.BigIntegerField(primary_key=True)
    job = models.ForeignKey(StoredJob, models.DO_NOTHING, related_name="timeline", db_constraint=False)
    at = models.DateTimeField()
    event = models.TextField()
    worker_id = models.TextField(null=True)
    error = models.TextField(null=True)
    detail = StoredJson(null=True)

    class Meta:
        """Jsworker, not Django, creates the table."""

        managed = False
        db_table = 'jsworker"."job_events'
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.event}"
