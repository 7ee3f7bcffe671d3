"""Orders in the admin, with a link to each one's job."""

from django.contrib import admin

from django_app.shop.models import Order
from jsworker.contrib.django.admin import job_link


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    """Lists orders."""

    list_display = ("id", "item", "receipt", "job")

    @admin.display(description="job")
    def job(self, order: Order) -> str:
        """Link to the job that writes the receipt."""
        return job_link(order.job_id)
