-- The passwords of the logins, out of their Secrets: run by psql in the server's pod at its first start.
\set migration `cat /run/secrets/jsworker/migration`
\set worker `cat /run/secrets/jsworker/worker`
\set producer `cat /run/secrets/jsworker/producer`
\set reader `cat /run/secrets/jsworker/reader`
\set metrics `cat /run/secrets/jsworker/metrics`
\set operator `cat /run/secrets/jsworker/operator`
ALTER ROLE jobs_migration PASSWORD :'migration';
ALTER ROLE jobs_worker PASSWORD :'worker';
ALTER ROLE jobs_producer PASSWORD :'producer';
ALTER ROLE jobs_reader PASSWORD :'reader';
ALTER ROLE jobs_metrics PASSWORD :'metrics';
ALTER ROLE jobs_operator PASSWORD :'operator';
ALTER ROLE postgres PASSWORD NULL;
