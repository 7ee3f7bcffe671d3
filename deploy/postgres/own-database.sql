-- For a database that jsworker has for itself: nobody else gets in, and nobody keeps anything there but jobs. After
-- roles.sql, by a superuser (the last statement is a superuser's alone; without it the rest holds); twice does no harm:
--   psql --set=ON_ERROR_STOP=1 --dbname=jsworker --file=deploy/postgres/own-database.sql
-- Not for a database that your application shares: it may want temporary tables, and its own logins.
-- Jobs that want temporary tables: GRANT TEMPORARY ON DATABASE jsworker TO jobs_worker;

DO $$
BEGIN
  EXECUTE format('REVOKE CONNECT, TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
  EXECUTE format(
    'GRANT CONNECT ON DATABASE %I TO jsworker_owner, jsworker_worker, jsworker_producer, jsworker_publisher,'
    ' jsworker_reader, jsworker_metrics, jsworker_debouncer, jsworker_operator',
    current_database());
END
$$;

-- Large objects belong to no table, so no right on a table bounds them.
REVOKE EXECUTE ON FUNCTION
  pg_catalog.lo_creat(integer), pg_catalog.lo_create(oid), pg_catalog.lo_from_bytea(oid, bytea) FROM PUBLIC;
