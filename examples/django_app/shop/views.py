"""The views."""

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_app.shop.jobs import Receipt, WriteReceipt
from django_app.shop.models import Order
from django_app.shop.tasks import thank
from jsworker.contrib.django import enqueue


@csrf_exempt
@require_POST
@transaction.atomic
def place_order(request: HttpRequest) -> HttpResponseBase:
    """Store an order, its job and its task in one transaction: there is never one without the others."""
    order = Order.objects.create(item=request.POST["item"], cents=int(request.POST["cents"]))
    order.job_id = enqueue(WriteReceipt, Receipt(order=order.pk)).id
    order.save(update_fields=["job_id"])
    thanks = thank.enqueue(order.pk)
    return JsonResponse({"order": order.pk, "job": str(order.job_id), "thanks": thanks.id}, status=202)


def show_order(_request: HttpRequest, number: int) -> HttpResponseBase:
    """Tell how far an order is."""
    order = get_object_or_404(Order, pk=number)
    return JsonResponse({"receipt": order.receipt, "thanked": order.thanked})
