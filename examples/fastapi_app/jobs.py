"""The jobs: `jsworker run fastapi_app.jobs:WriteReceipt` works on them."""

from pydantic import BaseModel

from fastapi_app.database import Order
from jsworker import Fail, Job, JobProcessor


class Receipt(BaseModel):
    """The payload."""

    order_id: int


class WriteReceipt(JobProcessor[Receipt]):
    """Writes the receipt of an order, in the transaction that completes the job."""

    kind = "write-receipt"
    max_attempts = 5
    timeout = 30.0

    async def process(self, job: Job[Receipt]) -> None:
        """Write it; the job's result is its text."""
        lines: list[str] = []
        async with job.transaction(result=lambda: {"receipt": lines[0]}) as session:
            order = await session.get(Order, job.payload.order_id)
            if order is None:
                raise Fail(f"there is no order {job.payload.order_id}")
            receipt = f"{order.item}: {order.cents / 100:.2f}"
            order.receipt = receipt
            lines.append(receipt)
