// Calls jsworker.enqueue with every argument by its name, and wrongly, and prints what came of it.
import pg from 'pg';

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
const traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
const named = {
  kind: ['k', 'text'],
  payload: [JSON.stringify({ ä: [1.5] }), 'jsonb'],
  unique_key: ['order:1', 'text'],
  delay: ['1 hour', 'interval'],
  max_attempts: [2, 'integer'],
  max_stalls: [3, 'integer'],
  traceparent: [traceparent, 'text'],
  tracestate: ['a=b', 'text'],
  max_payload_bytes: [1000, 'integer'],
  limit_key: ['tenant', 'text'],
  priority: ['high', 'text'],
  run_at: [null, 'timestamptz'],
  expires_in: ['2 hours', 'interval'],
  unique_scope: ['live', 'text'],
  unique_for: [null, 'interval'],
  debounce: [null, 'interval'],
  debounce_max: [null, 'interval'],
};
const list = Object.entries(named).map(([name, [, type]], place) => `${name} => $${place + 1}::${type}`);
const call = `SELECT id, created FROM jsworker.enqueue(${list.join(', ')})`;
const values = Object.values(named).map(([value]) => value);
const created = [];
for (let time = 0; time < 2; time += 1) {
  created.push((await client.query(call, values)).rows[0].created);
}

const wrong = {
  kind: ['SELECT jsworker.enqueue($1)', ['No Kind']],
  payload: ['SELECT jsworker.enqueue($1, $2::jsonb)', ['k', '{']],
  delay: ['SELECT jsworker.enqueue($1, delay => $2::interval)', ['k', '10 minz']],
  debounce: ["SELECT jsworker.enqueue($1, unique_key => 'k', debounce => '1 s')", ['k']],
  untyped: ['SELECT jsworker.enqueue($1, $2::text)', ['k', '{}']],
};
const codes = {};
for (const [name, [statement, parameters]] of Object.entries(wrong)) {
  try {
    await client.query(statement, parameters);
  } catch (error) {
    codes[name] = error.code;
  }
}
console.log(JSON.stringify({ given: Object.keys(named), created, codes, traceparent }));
await client.end();
