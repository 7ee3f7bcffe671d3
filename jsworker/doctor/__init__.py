"""``jsworker doctor``: examines settings, servers, tables, stream and jobs, and says what to do.

``gather`` reads facts, ``checks`` judges them one by one, and ``repairs`` mends, on request, what is safe to
mend. What could not be read is reported as not checked, never as healthy.
"""
