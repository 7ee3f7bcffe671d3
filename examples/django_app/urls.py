"""The pages."""

from django.contrib import admin
from django.urls import path

from django_app.shop import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/", views.place_order),
    path("orders/<int:number>/", views.show_order),
]
