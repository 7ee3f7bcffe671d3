"""Tasks of Django: before Django 6.0 those of its backport."""

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

from django_app.shop.models import Order


@task(queue_name="mail")
def thank(number: int) -> str:
    """Thank for an order, once."""
    Order.objects.filter(pk=number, thanked=False).update(thanked=True)
    return f"thanks for order {number}"
