"""The parent of worker processes: starts them, watches them, kills what hangs, and buries the dead.

Parent and child each speak over one end of a socket pair. ``parent`` and what it uses load neither SQLAlchemy
nor NATS before the first burial; ``birth`` and ``link`` are the child's side.
"""
