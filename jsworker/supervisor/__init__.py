"""Parent and children of ``jsworker run``: the parent starts, watches, restarts and kills worker processes.

Each has one end of a socket pair. The parent (``parent``, ``child_process``, ``dead_children``, ``probes``) loads
neither SQLAlchemy nor NATS before the first reset; the rest of ``child_*`` is the child's side, from ``child_main``.
"""
