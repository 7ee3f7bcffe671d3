"""Jobs in Django's admin: read-only pages, and links to them for pages of your own."""

from typing import Any

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from jsworker.contrib.django.configuration import database_alias
from jsworker.contrib.django.models import StoredJob


def job_link(job_id: Any) -> str:
    """Return a link to a job's page of the admin, for a column or a field of your own ModelAdmin."""
    if job_id is None:
        return ""
    page = reverse("admin:jsworker_storedjob_change", args=[job_id])
    link: str = format_html('<a href="{}">{}</a>', page, job_id)
    return link


@admin.register(StoredJob)
class StoredJobAdmin(admin.ModelAdmin):
    """Lists jobs and shows each with its timeline. Nothing can be changed here."""

    list_display = ("id", "kind", "status", "attempts", "created_at", "finished_at")
    list_filter = ("status",)
    search_fields = ("id", "kind__exact")
    ordering = ("-id",)
    show_full_result_count = False
    list_per_page = 50

    def get_queryset(self, request: Any) -> Any:
        """Return jobs from the database in which they are stored; only a job's page loads its contents."""
        jobs = StoredJob.objects.using(database_alias()).defer("payload", "result")
        return jobs.order_by(*self.ordering)

    def get_readonly_fields(self, request: Any, obj: Any = None) -> list[str]:
        """Return all fields, and the timeline."""
        return [field.name for field in StoredJob._meta.fields] + ["history"]  # noqa: SLF001 -- documented

    @admin.display(description="timeline")
    def history(self, job: StoredJob) -> SafeString:
        """Show what has happened to the job, oldest first."""
        rows = ((f"{each.at:%Y-%m-%d %H:%M:%S}", each.event, each.error or "") for each in job.timeline.all())
        return format_html_join("", "<p>{} <b>{}</b> {}</p>", rows)

    def has_add_permission(self, request: Any) -> bool:
        """Return False: jobs are enqueued by code."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False: nothing can be changed here."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False: workers delete ended jobs, after JSWORKER_RETENTION."""
        return False
