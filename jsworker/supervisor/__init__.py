"""Parent and children of ``jsworker run``: the parent starts, watches, restarts and kills worker processes.

The parent's side loads no SQLAlchemy and no NATS before its first reset; a child begins in ``child_main``.
"""
