// SPDX-License-Identifier: Apache-2.0
// node-postgres (pg), with pg-copy-streams and pg-cursor.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import pg from 'pg';
import copy from 'pg-copy-streams';
import Cursor from 'pg-cursor';

const env = process.env;
const base = {
  host: env.DRIVER_HOST, port: Number(env.DRIVER_PORT), user: env.DRIVER_USER, password: env.DRIVER_PASSWORD,
  database: env.DRIVER_DB, connectionTimeoutMillis: 20000,
};
const LARGE = 16 << 20;
const checks = {};

async function connect(options = {}) {
  const client = new pg.Client({ ...base, ...options });
  client.on('error', () => {});
  await client.connect();
  return client;
}

async function withClient(body, options) {
  const client = await connect(options);
  try { return await body(client); } finally { await client.end(); }
}

const value = async (client, query) => Object.values((await client.query(query)).rows[0])[0];

checks['connect-scram'] = () => withClient(async (c) => {
  assert.equal(await value(c, 'SELECT current_user'), env.DRIVER_USER);
});

checks['connect-tls-require'] = () => withClient(async (c) => {
  assert.equal(await value(c, 'SELECT 1'), 1);
  assert.ok(c.connection.stream.encrypted);
}, { ssl: { rejectUnauthorized: false } });

checks['connect-tls-verify-full'] = () => withClient(async (c) => {
  assert.ok(c.connection.stream.authorized);
}, { ssl: { ca: fs.readFileSync(env.DRIVER_CA, 'utf8'), rejectUnauthorized: true } });

checks['wrong-password'] = () => assert.rejects(connect({ password: 'no' }), /authentication failed/);

checks['simple-and-extended'] = () => withClient(async (c) => {
  const results = await c.query('SELECT 1 AS a; SELECT 2 AS b');
  assert.equal(results.length, 2);
  assert.deepEqual((await c.query('SELECT $1::int + 1 AS n, $2::text AS t', [41, null])).rows, [{ n: 42, t: null }]);
});

checks.prepared = () => withClient((one) => withClient(async (two) => {
  for (let n = 0; n < 20; n++) {
    for (const c of [one, two]) {
      assert.equal(await value(c, { name: 'double', text: 'SELECT $1::int * 2', values: [n] }), n * 2);
    }
  }
}));

// Runs only where it is asked for by name.
checks.repeated = () => withClient((one) => withClient(async (two) => {
  for (let n = 0; n < 5000; n++) {
    for (const c of [one, two]) {
      assert.equal(await value(c, { name: 'double', text: 'SELECT $1::int * 2', values: [n] }), n * 2);
    }
  }
}));

checks.queued = () => withClient(async (c) => {
  const all = await Promise.all(Array.from({ length: 200 }, (_, n) => value(c, { text: 'SELECT $1::int', values: [n] })));
  assert.deepEqual(all, [...Array(200).keys()]);
});

checks['pool-of-clients'] = async () => {
  const pool = new pg.Pool({ ...base, max: 8 });
  const all = await Promise.all(Array.from({ length: 100 }, async (_, n) => {
    const c = await pool.connect();
    try {
      await c.query('BEGIN');
      const got = await value(c, { text: 'SELECT $1::int', values: [n] });
      await c.query('COMMIT');
      return got;
    } finally { c.release(); }
  }));
  await pool.end();
  assert.deepEqual(all, [...Array(100).keys()]);
};

checks['copy-in-and-out'] = () => withClient(async (c) => {
  const table = `${env.DRIVER_TABLE}_node`;
  await c.query('BEGIN');
  await c.query(`CREATE TABLE ${table} (a int, b text)`);
  const lines = Array.from({ length: 20000 }, (_, n) => `${n}\trow ${n}\n`);
  await pipeline(Readable.from(lines), c.query(copy.from(`COPY ${table} FROM STDIN`)));
  let text = '';
  for await (const chunk of c.query(copy.to(`COPY (SELECT * FROM ${table} ORDER BY a) TO STDOUT`))) text += chunk;
  assert.equal(text, lines.join(''));
  await c.query(`DROP TABLE ${table}`);
  await c.query('COMMIT');
});

checks['session:listen-notify'] = () => withClient((listener) => withClient(async (sender) => {
  const got = new Promise((resolve) => { listener.on('notification', resolve); });
  await listener.query('LISTEN news');
  await sender.query("SELECT pg_notify('news', 'hello')");
  const note = await Promise.race([got, sleep(5000)]);
  assert.equal(note?.payload, 'hello');
}));

checks.cancel = () => withClient(async (c) => {
  const query = new pg.Query('SELECT pg_sleep(20)');
  const failed = new Promise((resolve) => { query.on('error', resolve); query.on('end', () => resolve(null)); });
  c.query(query);
  await sleep(300);
  const other = new pg.Client(base);
  other.on('error', () => {});
  other.cancel(c, query);
  assert.equal((await failed)?.code, '57014');
  assert.equal(await value(c, 'SELECT 1'), 1);
});

checks['error-in-transaction'] = () => withClient(async (c) => {
  await c.query('BEGIN');
  await assert.rejects(c.query('SELECT nonsense'), { code: '42703' });
  await assert.rejects(c.query('SELECT 1'), { code: '25P02' });
  await c.query('ROLLBACK');
  await c.query('BEGIN; SAVEPOINT s');
  await assert.rejects(c.query('SELECT 1 / $1::int', [0]), { code: '22012' });
  await c.query('ROLLBACK TO s');
  assert.equal(await value(c, 'SELECT 5'), 5);
  await c.query('COMMIT');
});

checks['large-values'] = () => withClient(async (c) => {
  const blob = Buffer.alloc(LARGE, 'abcdefgh');
  assert.ok((await value(c, { text: 'SELECT $1::bytea', values: [blob] })).equals(blob));
  const text = 'é'.repeat(LARGE / 2);
  assert.equal(await value(c, { text: 'SELECT $1::text', values: [text] }), text);
});

checks['many-parameters'] = () => withClient(async (c) => {
  const values = [...Array(30000).keys()];
  const sql = `SELECT count(*)::int FROM (VALUES ${values.map((n) => `($${n + 1}::int)`).join(',')}) v`;
  assert.equal(await value(c, { text: sql, values }), 30000);
});

checks['binary-results'] = () => withClient(async (c) => {
  const { rows } = await c.query({ text: 'SELECT 7::int4 AS a, true AS b', binary: true });
  assert.equal(rows[0].a, 7);
});

checks.cursor = () => withClient(async (c) => {
  await c.query('BEGIN');
  const cursor = c.query(new Cursor('SELECT generate_series(1, 5000) AS n'));
  let total = 0;
  for (let rows = await cursor.read(100); rows.length; rows = await cursor.read(100)) for (const r of rows) total += r.n;
  await cursor.close();
  await c.query('COMMIT');
  assert.equal(total, 12502500);
});

checks.notices = () => withClient(async (c) => {
  const seen = [];
  c.on('notice', (notice) => seen.push(notice.message));
  await c.query("DO $$BEGIN RAISE NOTICE 'one'; RAISE WARNING 'two'; END$$");
  assert.deepEqual(seen, ['one', 'two']);
});

checks['session-parameters'] = () => withClient((one) => withClient(async (two) => {
  await one.query("SET TimeZone = 'Asia/Tokyo'");
  for (let n = 0; n < 5; n++) {
    for (const [c, zone, name] of [[two, 'UTC', 'two'], [one, 'Asia/Tokyo', 'one']]) {
      const { rows } = await c.query("SELECT current_setting('TimeZone') AS z, current_setting('application_name') AS a");
      assert.deepEqual(rows, [{ z: zone, a: name }]);
    }
  }
}, { application_name: 'two' }), { application_name: 'one' });

for (const [key, body] of Object.entries(checks)) {
  const name = key.replace('session:', '');
  if (key !== name && env.DRIVER_MODE === 'transaction') continue;
  if (env.DRIVER_ONLY ? name !== env.DRIVER_ONLY : name === 'repeated') continue;
  try {
    await Promise.race([body(), sleep(60000, null, { ref: false }).then(() => { throw new Error('timed out'); })]);
    console.log(`${name}\tok\t`);
  } catch (error) {
    console.log(`${name}\tfail\t${String(error).replace(/\s+/g, ' ').slice(0, 500)}`);
  }
}
process.exit(0);
