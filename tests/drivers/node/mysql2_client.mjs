// SPDX-License-Identifier: Apache-2.0
// mysql2: prepared statements of the binary protocol.

import assert from 'node:assert/strict';
import mysql from 'mysql2/promise';

const env = process.env;
const base = {
  host: env.DRIVER_HOST, port: Number(env.DRIVER_PORT), user: env.DRIVER_USER, password: env.DRIVER_PASSWORD,
  database: env.DRIVER_DB, connectTimeout: 20000,
};
const checks = {};

async function withClient(body, options) {
  const client = await mysql.createConnection({ ...base, ...options });
  try { return await body(client); } finally { await client.end(); }
}

const rows = async (client, ...query) => (await client.execute(...query))[0];

checks.texts = () => withClient(async (c) => {
  assert.deepEqual((await c.query('SELECT ? AS n, ? AS t', [42, "o'clock \\"]))[0], [{ n: 42, t: "o'clock \\" }]);
});

checks.prepared = () => withClient(async (c) => {
  const values = [41, 1.5, null, 'ä', Buffer.from([0, 255, 128]), new Date(1700000000000), 12345678901234n];
  for (let n = 0; n < 5; n++) {
    values[0] = n;
    const [row] = await rows(c, 'SELECT ? AS a, ? AS b, ? AS c, ? AS d, ? AS e, ? AS f, ? AS g', values);
    assert.equal(Number(row.a), n);
    assert.equal(row.c, null);
    assert.equal(row.d, 'ä');
  }
  c.unprepare('SELECT ? AS a, ? AS b, ? AS c, ? AS d, ? AS e, ? AS f, ? AS g');
});

checks['many-values'] = () => withClient(async (c) => {
  const values = Array.from({ length: 2000 }, (_, n) => `value ${n}`);
  const [row] = await rows(c, `SELECT concat_ws(',', ${values.map(() => '?').join(', ')}) AS all_of_them`, values);
  assert.equal(row.all_of_them, values.join(','));
});

checks.transactions = () => withClient(async (c) => {
  await c.query('CREATE OR REPLACE TABLE node (a int primary key, b longblob)');
  await c.beginTransaction();
  await c.execute('INSERT INTO node VALUES (?, ?)', [1, Buffer.alloc(3_000_000, 7)]);
  await c.commit();
  await c.beginTransaction();
  await assert.rejects(c.execute('INSERT INTO node VALUES (?, ?)', [1, null]), /Duplicate/);
  await c.rollback();
  assert.equal((await rows(c, 'SELECT length(b) AS n FROM node'))[0].n, 3_000_000);
  await c.ping();
});

checks.pipelined = () => withClient(async (c) => {
  const answers = await Promise.all(Array.from({ length: 50 }, (_, n) => c.query('SELECT ? AS n', [n])));
  assert.deepEqual(answers.map(([[row]]) => row.n), Array.from({ length: 50 }, (_, n) => n));
});

for (const [name, body] of Object.entries(checks)) {
  try {
    await body();
    console.log(`${name}\tok\t`);
  } catch (error) {
    console.log(`${name}\tfail\t${String(error).replace(/\s+/g, ' ').slice(0, 500)}`);
  }
}
process.exit(0);
