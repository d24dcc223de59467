"""Real software as jobs: what its packages bring, driven so that what it prints is always the same.

Each job runs in a directory of its own (its working directory, and the ``$home`` of its script). It
prints one line a step and ends by itself with status 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Software:
    """One job.

    Attributes:
        script: Bash.
        needs: Programs that it starts; a machine without them skips the test.
        prepare: Bash, run once before the job starts.
        files: Text files in its directory.
        network: It has a network of its own.
        data: The directory in which it keeps files that it closes; empty: it keeps none.
        lines: Steps.
        marks: A pattern of files that appear, one a step; empty: the lines are printed step by step.
    """

    script: str
    needs: tuple[str, ...] = ()
    prepare: str = ""
    files: dict[str, str] = field(default_factory=dict)
    network: bool = False
    data: str = ""
    lines: int = 60
    marks: str = ""


_JAVA = """
import java.util.*;
import java.util.concurrent.*;

public class Main {
    static final Map<Integer, byte[]> kept = new ConcurrentHashMap<>();

    public static void main(String[] words) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(4);
        for (int step = 0; step < Integer.parseInt(words[0]); step++) {
            final int number = step;
            List<Future<Long>> parts = new ArrayList<>();
            for (int part = 0; part < 8; part++) {
                final int own = part;
                parts.add(pool.submit(() -> {
                    Random random = new Random(number * 31L + own);
                    byte[] fresh = new byte[200_000 + random.nextInt(100_000)];
                    random.nextBytes(fresh);
                    kept.put((number * 8 + own) % 200, fresh);
                    return (long) Arrays.hashCode(fresh);
                }));
            }
            long sum = 0;
            for (Future<Long> part : parts) sum = sum * 131 + part.get();
            for (int key : new TreeSet<>(kept.keySet())) sum = sum * 31 + kept.get(key)[number % 1000];
            System.out.println(step + " " + sum);
            Thread.sleep(150);
        }
        pool.shutdown();
    }
}
"""


def _java(collector: str) -> Software:
    return Software(
        f'exec java -Xmx256m -XX:+Use{collector}GC -cp "$home" Main 60',
        ("java", "javac"),
        'javac -d "$home" "$home/Main.java"',
        {"Main.java": _JAVA},
    )


_NODE = """
const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');
const { createHash } = require('crypto');
const zlib = require('zlib');
if (!isMainThread) {
  const shared = new Int32Array(workerData);
  parentPort.on('message', (number) => {
    for (let at = 0; at < shared.length; at++) Atomics.add(shared, at, number * at);
    parentPort.postMessage(number);
  });
} else {
  const memory = new SharedArrayBuffer(4 << 20);
  const worker = new Worker(__filename, { workerData: memory });
  const kept = [];
  let number = 0;
  worker.on('message', () => {
    kept.push(Buffer.alloc(100000, String(number)));
    if (kept.length > 100) kept.shift();
    const hash = createHash('sha256').update(new Uint8Array(memory)).update(zlib.gzipSync(kept[0]));
    console.log(number, hash.digest('hex'));
    if (++number < 60) setTimeout(() => worker.postMessage(number), 150);
    else process.exit(0);
  });
  worker.postMessage(number);
}
"""

_GO = """
package main

import (
	"crypto/sha256"
	"fmt"
	"sync"
	"time"
)

func main() {
	kept := map[int][]byte{}
	var lock sync.Mutex
	for step := 0; step < 60; step++ {
		var all sync.WaitGroup
		for part := 0; part < 16; part++ {
			all.Add(1)
			go func(part int) {
				defer all.Done()
				fresh := make([]byte, 100000)
				for at := range fresh {
					fresh[at] = byte(at * (step + 1) * (part + 3))
				}
				lock.Lock()
				kept[(step*16+part)%300] = fresh
				lock.Unlock()
			}(part)
		}
		all.Wait()
		sum := sha256.New()
		for key := 0; key < 300; key++ {
			sum.Write(kept[key])
		}
		fmt.Printf("%d %x\\n", step, sum.Sum(nil))
		time.Sleep(150 * time.Millisecond)
	}
}
"""

_R = """
set.seed(7)
kept <- matrix(rnorm(250000), 500)
for (step in 0:59) {
  kept <- kept %*% kept / sqrt(sum(kept^2)) * 20 + rnorm(250000) / 100
  cat(step, format(sum(abs(kept)), digits = 15), nrow(unique(round(kept[, 1:3], 1))), "\\n")
  flush(stdout())
  Sys.sleep(0.15)
}
"""

_RUBY = """
require "digest"
require "fiber"
kept = {}
makes = Fiber.new { step = 0; loop { step = Fiber.yield(Array.new(2000) { |at| "#{step}-#{at}" * 3 }) } }
makes.resume
60.times do |step|
  threads = 3.times.map { |part| Thread.new { [part, Digest::SHA256.hexdigest("#{step} #{part}" * 10000)] } }
  kept[step % 20] = [makes.resume(step), threads.map(&:value)]
  puts "#{step} #{Digest::SHA256.hexdigest(Marshal.dump(kept))}"
  $stdout.flush
  GC.start if step % 10 == 0
  sleep 0.15
end
"""

_PHP = """
<?php
$kept = [];
for ($step = 0; $step < 60; $step++) {
    $kept[$step % 20] = array_map(fn($at) => str_repeat("$step-$at", 3), range(0, 2000));
    echo $step, ' ', hash('sha256', serialize($kept)), "\\n";
    usleep(150000);
}
"""

_LISP = """
(defun digest (things) (reduce (lambda (a b) (mod (+ (* a 131) b) 1000000007)) things))
(let ((kept (make-hash-table)))
  (dotimes (step 60)
    (setf (gethash (mod step 20) kept)
          (loop for at below 50000 collect (mod (* (1+ at) (1+ step) 7919) 65521)))
    (format t "~d ~d~%" step
            (digest (loop for key below (min 20 (1+ step)) collect (digest (gethash key kept)))))
    (finish-output)
    (when (zerop (mod step 10)) (gc))
    (sleep 0.15)))
"""

_MANAGER = """
import hashlib, multiprocessing, time
from multiprocessing import shared_memory

def work(name, tasks, done, totals, lock):
    block = shared_memory.SharedMemory(name)
    while (task := tasks.get()) is not None:
        at = task % 16 << 16
        block.buf[at : at + 65536] = hashlib.sha256(b"%d" % task).digest() * 2048
        with lock:
            totals["sum"] += task
        done.put(task)
    block.close()

if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        block = shared_memory.SharedMemory(create=True, size=1 << 20)
        tasks, done, lock = multiprocessing.Queue(), multiprocessing.Queue(), multiprocessing.Lock()
        totals = manager.dict(sum=0)
        workers = [
            multiprocessing.Process(target=work, args=(block.name, tasks, done, totals, lock))
            for _ in range(3)
        ]
        for one in workers: one.start()
        for step in range(60):
            for part in range(16): tasks.put(step * 16 + part)
            assert sorted(done.get() for _ in range(16)) == list(range(step * 16, step * 16 + 16))
            print(step, totals["sum"], hashlib.sha256(block.buf).hexdigest(), flush=True)
            time.sleep(0.15)
        for _ in workers: tasks.put(None)
        for one in workers: one.join()
        block.close()
        block.unlink()
"""

_REDIS = """
import hashlib, socket, sys, time

def reply(file):
    line = file.readline()
    if line[:1] == b"$":
        return file.read(int(line[1:]) + 2)[:-2] if line != b"$-1\\r\\n" else None
    if line[:1] == b"*":
        return [reply(file) for _ in range(int(line[1:]))]
    assert line[:1] in (b"+", b":"), line
    return line[1:-2]

def ask(one, file, *words):
    words = [str(word).encode() for word in words]
    one.sendall(b"*%d\\r\\n" % len(words) + b"".join(b"$%d\\r\\n%s\\r\\n" % (len(w), w) for w in words))
    return reply(file)

peers = []
for family, address in ((socket.AF_UNIX, sys.argv[1]), (socket.AF_INET, ("127.0.0.1", 6379))):
    for _ in range(500):
        one = socket.socket(family)
        if not one.connect_ex(address): break
        one.close(); time.sleep(0.01)
    peers.append((one, one.makefile("rb")))
for step in range(60):
    for number in range(100):
        ask(*peers[number % 2], "SET", f"key:{step * 7 + number}", f"{step}-{number}" * 50)
        ask(*peers[number % 2], "ZINCRBY", "board", number, f"player:{number % 17}")
    found = ask(*peers[step % 2], "ZRANGE", "board", 0, -1, "WITHSCORES")
    size = ask(*peers[0], "DBSIZE")
    kept = ask(*peers[1], "GET", f"key:{step * 5}")
    print(step, size, hashlib.sha256(repr((found, kept)).encode()).hexdigest(), flush=True)
    time.sleep(0.15)
peers[0][0].sendall(b"SHUTDOWN NOSAVE\\r\\n")
"""

_FETCH = """
import hashlib, http.client, time
kept = http.client.HTTPConnection("127.0.0.1", 8080, timeout=30)  # one connection for the whole job
for step in range(60):
    for connection in (kept, http.client.HTTPConnection("127.0.0.1", 8080, timeout=30)):
        connection.request("GET", f"/big?{step}", headers={"Range": f"bytes={step * 1000}-{step * 30000 + 99999}"})
        answer = connection.getresponse()
        print(step if connection is kept else "", answer.status, hashlib.sha256(answer.read()).hexdigest(),
              end=" " if connection is kept else "\\n", flush=True)
        if connection is not kept: connection.close()
    time.sleep(0.15)
"""

_NGINX = """
user root;
worker_processes 3;
daemon off;
error_log stderr crit;
pid nginx.pid;
events { worker_connections 64; }
http {
    access_log off;
    sendfile on;
    gzip on;
    server {
        listen 127.0.0.1:8080;
        root .;
        client_body_temp_path temporary;
        proxy_temp_path temporary;
        fastcgi_temp_path temporary;
        uwsgi_temp_path temporary;
        scgi_temp_path temporary;
    }
}
"""

_POSTGRES = """
export PATH=$(pg_config --bindir):$PATH PGHOST=$home PGDATA=$home/data PGUSER=postgres PGDATABASE=postgres
as() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
as postgres -c listen_addresses=127.0.0.1 -c unix_socket_directories="$home" -c shared_buffers=64MB \\
    -c dynamic_shared_memory_type=sysv \\
    -c max_parallel_workers_per_gather=2 -c fsync=off -c log_min_messages=fatal 2>"$home/data/errors" &
until pg_isready -q; do sleep 0.1; done
echo 'CREATE TABLE kept (number int PRIMARY KEY, text text)' | as psql -q
work() {
    for step in $(seq 0 59); do
        echo "INSERT INTO kept SELECT $step * 100 + at, repeat(md5(($step * at)::text), 20) FROM generate_series(1, 100) at;"
        echo "SELECT $step, count(*), md5(string_agg(text, '' ORDER BY number)) FROM kept;"
        sleep 0.15
    done
}
work | as psql -qtAX -h "$1" || exit 1
kill -INT $(head -1 "$home/data/postmaster.pid")
wait
"""


def _postgres(host: str) -> Software:
    return Software(
        f"set -- {host}\n{_POSTGRES}",
        ("pg_config", "psql", "setpriv"),
        'chown postgres "$home"; PATH=$(pg_config --bindir):$PATH;'
        ' setpriv --reuid=postgres --regid=postgres --clear-groups initdb -A trust -D "$home/data"',
        network=True,
        data="data",
    )


_MAKEFILE = """
all: $(foreach n,$(shell seq 60),part$(n).o)
\t@gcc -o whole main.c $^ && ./whole
part%.o: part%.c
\t@gcc -O2 -pipe -c -o $@ $<
"""

_PARTS = """
mkdir "$home/build"
cp "$home/Makefile" "$home/build"
for n in $(seq 60); do
    for k in $(seq 150); do  # enough for a compiler to take a while
        echo "long more${n}_$k(long x, long *y) { for (int i = 0; i < 9; i++) y[i] += x * $k >> i; return y[$k % 9]; }"
    done > "$home/build/part$n.c"
    echo "long part$n(long x) { for (int i = 0; i < $n; i++) x = x * 31 + i * $n; return x; }" >> "$home/build/part$n.c"
done
{
    echo '#include <stdio.h>'
    for n in $(seq 60); do echo "long part$n(long);"; done
    echo 'int main(void) { long x = 1;'
    for n in $(seq 60); do echo "x = part$n(x); printf(\\"$n %ld\\\\n\\", x);"; done
    echo 'return 0; }'
} > "$home/build/main.c"
"""

SOFTWARE = {
    "java-serial": _java("Serial"),
    "java-parallel": _java("Parallel"),
    "java-g1": _java("G1"),
    "java-z": _java("Z"),
    "node": Software('exec node "$home/main.js"', ("node",), files={"main.js": _NODE}),
    "go": Software(
        'exec "$home/main"',
        ("go",),
        'cd "$home" && GOCACHE="$home/cache" GOFLAGS=-mod=mod go build -o main main.go',
        {"main.go": _GO},
    ),
    "r": Software('exec Rscript "$home/main.R"', ("Rscript",), files={"main.R": _R}),
    "ruby": Software('exec ruby "$home/main.rb"', ("ruby",), files={"main.rb": _RUBY}),
    "php": Software('exec php "$home/main.php"', ("php",), files={"main.php": _PHP.strip()}),
    "sbcl": Software('exec sbcl --script "$home/main.lisp"', ("sbcl",), files={"main.lisp": _LISP}),
    "multiprocessing": Software(
        'exec python3 "$home/main.py"', ("python3",), files={"main.py": _MANAGER}
    ),
    "redis": Software(
        'redis-server --save "" --unixsocket "$home/socket" >"$home/log" &\n'
        'python3 "$home/client.py" "$home/socket" && wait',
        ("redis-server", "python3"),
        files={"client.py": _REDIS},
        network=True,
    ),
    "nginx": Software(
        'nginx -p "$home" -c "$home/nginx.conf" & server=$!\n'
        "until (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null; do sleep 0.05; done\n"
        'python3 "$home/client.py" || exit 1; kill $server; wait $server',
        ("nginx", "python3"),
        'seq 1000000 > "$home/big"; chmod 755 "$home"; sed -i "s#root .#root $home#" "$home/nginx.conf"',
        {"nginx.conf": _NGINX, "client.py": _FETCH},
        network=True,
    ),
    "postgres-unix": _postgres('"$home"'),
    "postgres-tcp": _postgres("127.0.0.1"),
    "ffmpeg": Software(
        "exec ffmpeg -v error -re -f lavfi -i testsrc2=size=640x360:rate=10:duration=8"
        " -threads 4 -c:v mpeg4 -flush_packets 1 -f framemd5 -",
        ("ffmpeg",),
        lines=90,
    ),
    "make": Software(
        'exec make -s -j 4 -C "$home/build"',
        ("make", "gcc"),
        _PARTS,
        {"Makefile": _MAKEFILE},
        data="build",  # what was being compiled at the kill exists, and must not count as made
        marks="build/*.o",
    ),
}
