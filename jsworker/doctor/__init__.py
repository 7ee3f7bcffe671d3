"""``jsworker doctor``: looks at settings, servers, tables, stream and clocks, and says what to do.

The way of an examination: ``gather`` reads facts, ``checks`` judges them one by one, ``repairs`` mends what
is safe to mend when it was asked to. What could not be read is told as not checked, never as healthy.
"""
