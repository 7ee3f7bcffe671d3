"""Isolated processes: warm ones for the jobs of isolated kinds, and quarantine: one for a job alone."""
