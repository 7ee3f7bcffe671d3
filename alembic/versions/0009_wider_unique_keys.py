"""A unique key is any printable text of 1 to 255 characters: an e-mail address, a URL, a path.

The rows that are there obeyed a narrower rule; 0010 lets PostgreSQL see that they obey this one.

Revision: 0009, after 0008
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# Python decides what is printable; here, what would break a line or a terminal.
WIDER = r"""
ALTER TABLE jsworker.jobs
  DROP CONSTRAINT jobs_unique_key,
  ADD CONSTRAINT jobs_unique_key CHECK (
    unique_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(unique_key) BETWEEN 1 AND 255
  ) NOT VALID
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(WIDER)
