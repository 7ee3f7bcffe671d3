"""The jobs of the app, which `manage.py jsworker_run` finds by this module's name."""

from pydantic import BaseModel

from django_app.shop.models import Order
from jsworker import Fail, Job, JobProcessor


class Receipt(BaseModel):
    """The payload."""

    order: int


class WriteReceipt(JobProcessor[Receipt]):
    """Writes the receipt of an order through Django's models."""

    kind = "write-receipt"
    timeout = 30.0

    def process(self, job: Job[Receipt]) -> dict[str, str]:
        """Write it; running twice does no harm."""
        try:
            order = Order.objects.get(pk=job.payload.order)
        except Order.DoesNotExist:
            raise Fail(f"there is no order {job.payload.order}") from None
        order.receipt = f"{order.item}: {order.cents / 100:.2f}"
        order.save(update_fields=["receipt"])
        return {"receipt": order.receipt}
