"""A shop in Django whose orders are worked on by jobs and by tasks of Django."""
