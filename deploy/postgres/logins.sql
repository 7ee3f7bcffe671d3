-- Logins for six roles of roles.sql, which runs before:
--
--   jobs_migration  `jsworker db upgrade`, `jsworker stream ensure`
--   jobs_worker     `jsworker run`, and the commands that are typed in a worker's pod
--   jobs_operator   the dashboard, which reads as jsworker_reader, and the commands of operators elsewhere; it deletes
--                   no job and nothing of the audit. Make logins of people in the same way
--   jobs_producer   applications that enqueue; with jsworker_reader as well they may call client.get(), and with
--                   jsworker_publisher publish what they enqueue by thousands without the help of workers
--   jobs_reader     people who look
--   jobs_metrics    KEDA, dashboards
--
-- Plain SQL for whoever ran roles.sql; twice does no harm:
--   psql --set=ON_ERROR_STOP=1 --dbname=jsworker --file=deploy/postgres/logins.sql
-- Without passwords, which come from your vault: \password jobs_worker in psql sends no clear text. In Kubernetes
-- Secrets hold them (docs/kubernetes.md). A login without a password is refused wherever one is asked for.
--
-- Where no statement of your jobs takes longer, job.transaction() included:
--   ALTER ROLE jobs_worker SET statement_timeout = '60s';

DO $$
DECLARE
  login record;
BEGIN
  FOR login IN
    SELECT * FROM (VALUES
      ('jobs_migration', 'jsworker_owner', 5),
      ('jobs_worker', 'jsworker_worker', 450),     -- 43 for each process of the largest fleet, and some
      ('jobs_producer', 'jsworker_producer', 100), -- 23 for each JobClient; max_connections is above the sum
      ('jobs_reader', 'jsworker_reader', 5),
      ('jobs_metrics', 'jsworker_metrics', 5),
      ('jobs_operator', 'jsworker_operator', 30)   -- 23 for a dashboard, and commands
    ) AS logins (name, member_of, connections)
  LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = login.name) THEN
      EXECUTE format('CREATE ROLE %I LOGIN', login.name);
    END IF;
    EXECUTE format('ALTER ROLE %I CONNECTION LIMIT %s', login.name, login.connections);
    EXECUTE format('GRANT %I TO %I', login.member_of, login.name);
  END LOOP;
END
$$;

GRANT jsworker_reader TO jobs_worker, jobs_operator; -- with --read-role the dashboard reads its pages with no right to write

-- Settings of a role are not inherited, so they belong to the logins.
ALTER ROLE jobs_migration SET role = 'jsworker_owner'; -- what it makes belongs to the role
ALTER ROLE jobs_worker SET idle_in_transaction_session_timeout = '60s';
ALTER ROLE jobs_producer SET idle_in_transaction_session_timeout = '60s';
ALTER ROLE jobs_producer SET statement_timeout = '30s';
ALTER ROLE jobs_operator SET idle_in_transaction_session_timeout = '60s';
ALTER ROLE jobs_reader SET default_transaction_read_only = on;
ALTER ROLE jobs_reader SET statement_timeout = '10s';
ALTER ROLE jobs_metrics SET default_transaction_read_only = on;
ALTER ROLE jobs_metrics SET statement_timeout = '10s';
