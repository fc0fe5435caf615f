// Serves a database with a cluster of four processes, over better-sqlite3 and the door, and asks them:
//
//     node cluster.js EXTENSION DATABASE
//
// Exits with an error if a request failed, a sum was not 0, or an answered change is lost.
'use strict';
const cluster = require('node:cluster');
const http = require('node:http');
const Database = require('better-sqlite3');

const [extension, path] = process.argv.slice(2);
const ACCOUNTS = 2000;
const CLIENTS = 8;
const REQUESTS = 1200;

const loader = new Database(':memory:');
loader.loadExtension(extension, 'sqlite3_bifoliodefault_init');
loader.close();

function open() {
  const database = new Database(path, { timeout: 10000 });
  database.pragma('journal_mode = wal');
  database.pragma('synchronous = normal');
  return database;
}

function serve() {
  const database = open();
  const change = database.prepare('update account set amount=amount+? where id=?');
  const visit = database.prepare('insert into visit(process) values(?)');
  const move = database.transaction((source, target) => {
    change.run(-1, source);
    change.run(1, target);
    visit.run(process.pid);
  });
  const total = database.prepare('select sum(amount) from account').pluck();
  http.createServer((request, response) => {
    const [, kind, source, target] = request.url.split('/');
    try {
      if (kind === 'move') move.immediate(Number(source), Number(target));
      response.end(kind === 'move' ? 'moved' : String(total.get()));
    } catch (problem) {
      response.statusCode = 500;
      response.end(String(problem));
    }
  }).listen(0, '127.0.0.1', function () {
    process.send(this.address().port);
  });
}

function ask(port, url) {
  return new Promise((resolve, reject) => {
    http.get({ host: '127.0.0.1', port, path: url, agent: false }, (response) => {
      let text = '';
      response.on('data', (part) => { text += part; });
      response.on('end', () => (response.statusCode === 200 ? resolve(text) : reject(new Error(text))));
    }).on('error', reject);
  });
}

async function main() {
  const database = open();
  database.exec('create table account(id integer primary key, amount integer, filler text);'
    + 'create table visit(id integer primary key, process integer)');
  const insert = database.prepare('insert into account values(?, 0, ?)');
  database.transaction(() => {
    for (let id = 0; id < ACCOUNTS; id += 1) insert.run(id, 'x'.repeat(200));
  })();
  const ports = await Promise.all([1, 2, 3, 4].map(() => new Promise((resolve) => {
    cluster.fork().once('message', resolve);
  })));
  let left = REQUESTS;
  let moves = 0;
  const client = async () => {
    while (left > 0) {
      left -= 1;
      const port = ports[left % ports.length];
      if (left % 4 === 0) {
        const sum = await ask(port, '/total');
        if (sum !== '0') throw new Error(`a sum of ${sum}`);
      } else {
        const some = () => Math.floor(Math.random() * ACCOUNTS);
        await ask(port, `/move/${some()}/${some()}`);
        moves += 1;
      }
    }
  };
  await Promise.all(Array.from({ length: CLIENTS }, client));
  await new Promise((resolve) => { cluster.disconnect(resolve); });
  const visits = database.prepare('select count(*), count(distinct process) from visit').raw().get();
  const integrity = database.pragma('integrity_check', { simple: true });
  if (visits[0] !== moves || visits[1] < 2 || integrity !== 'ok') {
    throw new Error(`${visits[0]} visits of ${moves} answered, by ${visits[1]} processes; ${integrity}`);
  }
  console.log(`cluster: ${REQUESTS} requests, ${moves} changes by ${visits[1]} processes`);
}

if (cluster.isPrimary) {
  main().catch((problem) => { console.error(problem); process.exit(1); });
} else {
  serve();
}
