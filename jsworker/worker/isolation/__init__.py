"""Quarantine: a job whose next stall would be its last runs alone, in a process that its owner survives."""
