"""Quarantine: a job whose next stall would be its last runs alone, in a process of its own.

Its owner stays the worker that claimed it, which renews and settles it. If the job takes its process down, no
other job goes with it, and the worker that lives on knows which one did it.
"""
