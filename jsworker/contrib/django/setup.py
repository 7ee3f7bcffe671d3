"""Calls ``django.setup``: the first module of ``JSWORKER_PRELOAD``, imported in processes that run jobs."""

import django

django.setup()
