"""``jsworker doctor``: examines settings, servers, tables, stream and jobs, and says what to do.

``gather`` reads facts, ``checks`` judges them one by one, ``repairs`` mends what is safe to mend when it was
asked to. What could not be read is reported as not checked, never as healthy.
"""
