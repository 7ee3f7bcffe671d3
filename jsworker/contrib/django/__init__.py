"""Django: an app whose ``enqueue`` writes the job in the transaction of the rows that it is about.

``INSTALLED_APPS = ["jsworker.contrib.django", …]``; the settings are in ``JSWORKER = {…}``.
"""

from jsworker.contrib.django.enqueueing import enqueue, jobs_client
from jsworker.contrib.django.middleware import fresh_connections

__all__ = ["enqueue", "fresh_connections", "jobs_client"]
