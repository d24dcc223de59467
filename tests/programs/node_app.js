// A Node.js process: timers, buffers with check sums, a garbage-collected heap, a worker thread sharing memory.
//
//     UV_USE_IO_URING=0 node node_app.js STATE_DIR [MIB]
//
// The worker keeps rewriting its half of the shared memory, this thread the other; each verifies both by turns.
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');

const BLOCK = 64 << 10;
const PAGE = 4096;

// Bytes that are a function of two numbers: AES in counter mode over zeros.
function content(number, version, size) {
  const key = Buffer.alloc(16);
  key.writeUInt32LE(number, 0);
  key.writeUInt32LE(version, 4);
  return crypto.createCipheriv('aes-128-ctr', key, Buffer.alloc(16)).update(Buffer.alloc(size));
}

// Shared memory written by turns: turn n rewrites one page; what each page must hold follows from n alone.
function pageOf(turn, pages) {
  return (turn * 7) % pages;
}

function lastTurn(turn, page, pages) {
  for (let t = turn; t > 0 && t > turn - pages; t--) if (pageOf(t, pages) === page) return t;
  return 0;
}

function verifyShared(shared, turn, page) {
  const pages = shared.length / PAGE;
  const writer = lastTurn(turn, page, pages);
  const expected = writer === 0 ? Buffer.alloc(PAGE) : content(1 << 20, writer, PAGE);
  if (Buffer.compare(expected, shared.subarray(page * PAGE, (page + 1) * PAGE)) === 0) return '';
  return `shared page ${page} at turn ${turn} is not what turn ${writer} wrote`;
}

function writeShared(shared, turn) {
  content(1 << 20, turn, PAGE).copy(shared, pageOf(turn, shared.length / PAGE) * PAGE);
}

function workerMain() {
  const shared = Buffer.from(workerData);
  const pages = shared.length / PAGE;
  parentPort.on('message', (turn) => {
    const wrong = [pageOf(turn, pages), turn % pages].map((page) => verifyShared(shared, turn, page)).find(Boolean);
    writeShared(shared, turn + 1);
    parentPort.postMessage({ turn: turn + 1, wrong: wrong ? `worker: ${wrong}` : '' });
  });
}

function main() {
  const directory = process.argv[2];
  const blocks = Math.max(4, (Number(process.argv[3] || 32) << 20) / BLOCK);
  const errors = [];
  let errorCount = 0;
  let counter = 0;
  let writes = 0;
  let writtenAt = 0;

  function violation(what) {
    errorCount++;
    if (errors.length < 8) errors.push(what);
  }

  function write(finished) {
    const now = Number(process.hrtime.bigint() / 1000000n);
    if (!finished && now - writtenAt < 20) return;
    writtenAt = now;
    writes++;
    const state = {
      program: 'node_app', pid: process.pid, counter, writes, errors, error_count: errorCount, finished,
      passed: finished ? errorCount === 0 : null, regions: [], facts: { turn, ticks, chained, objects: heap.size },
    };
    const temporary = path.join(directory, '.state.json.new');
    fs.writeFileSync(temporary, JSON.stringify(state));
    fs.renameSync(temporary, path.join(directory, 'state.json'));
  }

  // Buffers outside the JavaScript heap.
  const versions = new Array(blocks).fill(1);
  const buffers = versions.map((version, n) => content(n, version, BLOCK));
  const digests = buffers.map((buffer) => crypto.createHash('sha1').update(buffer).digest('hex'));

  function verifyBuffer(n) {
    const digest = crypto.createHash('sha1').update(buffers[n]).digest('hex');
    if (digest !== digests[n]) violation(`buffer ${n}, version ${versions[n]}: its check sum has changed`);
    if (Buffer.compare(buffers[n], content(n, versions[n], BLOCK))) violation(`buffer ${n} differs from version ${versions[n]}`);
  }

  // Objects on the JavaScript heap that come and go.
  const heap = new Map();
  const makeObject = (n) => ({ n, text: `object ${n} `.repeat(n % 40), list: Array.from({ length: n % 30 }, (_, i) => n * i) });

  function churn() {
    for (let i = 0; i < 20; i++) heap.set(counter * 20 + i, makeObject(counter * 20 + i));
    for (const [n, object] of heap) {
      if (heap.size <= 5000) break;
      if (JSON.stringify(object) !== JSON.stringify(makeObject(n))) violation(`object ${n} has changed`);
      heap.delete(n);
    }
  }

  // A worker that takes turns with this thread.
  let turn = 0;
  const memory = new SharedArrayBuffer(64 * PAGE);
  const shared = Buffer.from(memory);
  const worker = new Worker(__filename, { workerData: memory });
  worker.on('error', (error) => violation(`the worker crashed: ${error.stack}`));
  worker.on('message', (message) => {
    if (message.wrong) violation(message.wrong);
    if (message.turn !== turn + 2) violation(`the worker answered turn ${turn + 1} with ${message.turn}`);
    turn = message.turn;
    const wrong = [pageOf(turn, 64), (turn * 3) % 64].map((page) => verifyShared(shared, turn, page)).find(Boolean);
    if (wrong) violation(`main thread: ${wrong}`);
    if (!finishing) setTimeout(ask, 1);
    else end();
  });
  function ask() {
    turn++;
    writeShared(shared, turn);
    worker.postMessage(turn);
    turn--;
  }

  // Timers: an interval, a chain of time-outs, immediates, and one that must not fire.
  let ticks = 0;
  let chained = 0;
  setInterval(() => { ticks++; }, 7);
  const chain = () => { chained++; setTimeout(chain, 3); };
  setTimeout(chain, 3);
  setTimeout(() => violation('a time-out of ten hours has fired'), 36000000).unref();

  let finishing = false;
  let lastTicks = 0;
  let lastChained = 0;
  function step() {
    counter++;
    const n = counter % blocks;
    verifyBuffer(n);
    versions[n]++;
    buffers[n] = content(n, versions[n], BLOCK);
    digests[n] = crypto.createHash('sha1').update(buffers[n]).digest('hex');
    verifyBuffer((counter * 31) % blocks);
    churn();
    if (counter % 500 === 0) {
      if (ticks === lastTicks || chained === lastChained) violation('a timer has stopped');
      [lastTicks, lastChained] = [ticks, chained];
    }
    write(false);
    if (fs.existsSync(path.join(directory, 'finish'))) finishing = true;    // the worker's next answer ends it
    else setTimeout(step, 2);
  }

  function end() {
    for (let n = 0; n < blocks; n++) verifyBuffer(n);
    for (const [n, object] of heap)
      if (JSON.stringify(object) !== JSON.stringify(makeObject(n))) violation(`object ${n} has changed`);
    for (let page = 0; page < 64; page++) {
      const wrong = verifyShared(shared, turn, page);
      if (wrong) violation(wrong);
    }
    write(true);
    process.exit(errorCount ? 1 : 0);
  }

  process.on('uncaughtException', (error) => {
    violation(`crashed: ${error.stack}`);
    write(true);
    process.exit(1);
  });
  ask();
  step();
}

if (isMainThread) main();
else workerMain();
