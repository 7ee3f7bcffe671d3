"""Sets Django up: the first module of ``JSWORKER_PRELOAD``, for processes that jobs run in."""

import django

django.setup()
