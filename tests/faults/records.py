"""What the harness keeps in the database: effects, every move of a job, and what broke a rule."""

import psycopg

from tests.faults.flow_control import TRIGGERS

ROLE = "faults_worker"
"""The fleet's login: no superuser, so that a limit on its connections binds it."""

SCHEMA = f"""
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}') THEN CREATE ROLE {ROLE} LOGIN; END IF;
END $$;
CREATE SCHEMA faults;
CREATE TABLE faults.effects (
  id bigint GENERATED ALWAYS AS IDENTITY, job_id uuid NOT NULL, token bigint NOT NULL);
CREATE TABLE faults.ledger (job_id uuid PRIMARY KEY, fence bigint NOT NULL);
CREATE TABLE faults.ledger_log (
  id bigint GENERATED ALWAYS AS IDENTITY, job_id uuid NOT NULL, fence bigint NOT NULL);
CREATE TABLE faults.moves (
  seq bigint GENERATED ALWAYS AS IDENTITY, job_id uuid NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  was text NOT NULL, now text NOT NULL,
  old_token bigint NOT NULL, token bigint NOT NULL, dispatch bigint NOT NULL,
  owner text, worker text, errors int NOT NULL, stalls int NOT NULL,
  silent_for double precision, allowed double precision);
CREATE TABLE faults.deleted (job_id uuid NOT NULL);

CREATE FUNCTION faults.record_move() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO faults.moves (
    job_id, was, now, old_token, token, dispatch, owner, worker, errors, stalls, silent_for, allowed)
  VALUES (
    NEW.id, OLD.status, NEW.status, OLD.fencing_token, NEW.fencing_token, NEW.dispatch,
    OLD.worker_id, NEW.worker_id, NEW.errors, NEW.stalls,
    extract(epoch FROM clock_timestamp() - OLD.last_activity_at), extract(epoch FROM OLD.stale_after));
  RETURN NULL;
END $$;
CREATE TRIGGER record_move AFTER UPDATE OF status, fencing_token, dispatch ON jsworker.jobs FOR EACH ROW
WHEN (OLD.status <> NEW.status OR OLD.fencing_token <> NEW.fencing_token OR OLD.dispatch <> NEW.dispatch)
EXECUTE FUNCTION faults.record_move();

CREATE FUNCTION faults.record_deletion() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO faults.deleted VALUES (OLD.id);
  RETURN NULL;
END $$;
CREATE TRIGGER record_deletion AFTER DELETE ON jsworker.jobs FOR EACH ROW
EXECUTE FUNCTION faults.record_deletion();
{TRIGGERS}
GRANT USAGE ON SCHEMA faults TO {ROLE};
GRANT ALL ON ALL TABLES IN SCHEMA faults TO {ROLE};
GRANT ALL ON ALL SEQUENCES IN SCHEMA faults TO {ROLE};
"""  # noqa: S608 -- a constant

ALL_RIGHTS = f"""
GRANT USAGE ON SCHEMA jsworker TO {ROLE};
GRANT ALL ON ALL TABLES IN SCHEMA jsworker TO {ROLE};
GRANT ALL ON ALL SEQUENCES IN SCHEMA jsworker TO {ROLE};
"""


def prepare(url: str, *, rights: str = ALL_RIGHTS) -> None:
    """Add the harness's tables, triggers and role to a migrated database, and give the role its rights."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"{SCHEMA}{rights}".encode())
