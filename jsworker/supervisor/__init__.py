"""Parent and children of ``jsworker run``: the parent starts, watches, restarts and kills worker processes.

Each has one end of a socket pair. The parent's side is ``parent``, ``children``, ``child_process``,
``dead_children`` and ``probes``, which load neither SQLAlchemy nor NATS before the first reset. The
child begins in ``child_main``.
"""
