"""The dashboard: a web application that shows jobs and workers, explains and repairs.

``app`` is its table of contents, ``pages/`` holds a module for each page, ``access`` decides who may do what,
``live`` feeds all open pages from one poller. It needs the extra ``dashboard``.
"""

from jsworker.dashboard.access import ACTIONS, Access, Authorize
from jsworker.dashboard.app import dashboard
from jsworker.dashboard.authentication import PasswordFile, ProxyHeaders

__all__ = ["ACTIONS", "Access", "Authorize", "PasswordFile", "ProxyHeaders", "dashboard"]
