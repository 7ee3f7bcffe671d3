"""Django's settings, as short as they can be; `jsworker dev` sets the address of the database."""

import os
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

_place = urlsplit(os.environ.get("JSWORKER_DATABASE_URL", "postgresql://postgres@127.0.0.1:5432/postgres"))

SECRET_KEY = os.environ.get("SECRET_KEY", "only for development")
DEBUG = True
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "django_app.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(_place.path.removeprefix("/")),
        "USER": unquote(_place.username or ""),
        "PASSWORD": unquote(_place.password or ""),
        "HOST": _place.hostname or "",
        "PORT": str(_place.port or ""),
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "jsworker.contrib.django",
    "django_app.shop",
]
if find_spec("django.tasks") is None:  # before Django 6.0
    INSTALLED_APPS.append("django_tasks")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

JSWORKER = {"CONCURRENCY": 4}
TASKS = {
    "default": {
        "BACKEND": "jsworker.contrib.django.tasks.JsworkerBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"MAX_ATTEMPTS": 3},
    }
}
