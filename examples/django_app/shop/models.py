"""Orders."""

from django.db import models


class Order(models.Model):
    """An order; a job writes its receipt, a task of Django thanks for it."""

    item = models.CharField(max_length=100)
    cents = models.PositiveIntegerField()
    receipt = models.CharField(max_length=200, blank=True)
    thanked = models.BooleanField(default=False)
    job_id = models.UUIDField(null=True)

    def __str__(self) -> str:
        return f"order {self.pk}"
