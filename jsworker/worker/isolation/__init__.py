"""Isolated processes: they run jobs of isolated kinds, warm, and alone each job whose next stall would be its last."""
