"""More real software as jobs (see `tests.roundtrip.software`): parallel programs, sanitizers, other
runtimes and databases, and programs that wait for many kinds of kernel objects.
"""

from __future__ import annotations

from tests.roundtrip.software import Software

_MPI = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank, size, n = 1 << 20;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    double *own = malloc(n * sizeof *own), *all = malloc(n * sizeof *all);
    for (int i = 0; i < n; i++) own[i] = (rank + 1) * (i % 1000);
    for (int step = 0; step < 60; step++) {
        static double others[100000];
        MPI_Allreduce(own, all, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < n; i++) own[i] = all[i] / size + (i + step + rank) % 7;
        MPI_Sendrecv(own, 100000, MPI_DOUBLE, (rank + 1) % size, 7, others, 100000, MPI_DOUBLE,
                     (rank + size - 1) % size, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < 100000; i++) own[i + 1000] += others[i] / 3;
        if (!rank) {
            double sum = 0;
            for (int i = 0; i < n; i++) sum += own[i] * (i % 13);
            printf("%d %.10g\n", step, sum);
            fflush(stdout);
        }
        usleep(100000);
    }
    MPI_Finalize();
    return 0;
}
"""

_OPENMP = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void) {
    long n = 4 << 20;
    unsigned *kept = calloc(n, sizeof *kept);
    for (int step = 0; step < 60; step++) {
        unsigned long sum = 0;
        #pragma omp parallel for reduction(+:sum) schedule(dynamic, 10000) num_threads(6)
        for (long i = 0; i < n; i++) {
            kept[i] = kept[i] * 1664525u + step + i;
            sum += kept[i];
        }
        printf("%d %lu\n", step, sum);
        fflush(stdout);
        usleep(100000);
    }
}
"""

_THREADS = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *kept[500];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long sum;

static void *work(void *given) {
    long own = (long)given;
    size_t size = 10000 + own * 7919 % 90000;
    char *fresh = malloc(size);
    memset(fresh, own & 127, size);
    pthread_mutex_lock(&lock);
    free(kept[own % 500]);
    kept[own % 500] = fresh;
    sum += size * (own % 8 + 1) + own / 8;
    pthread_mutex_unlock(&lock);
    return NULL;
}

int main(void) {
    for (long step = 0; step < 60; step++) {
        pthread_t all[8];
        for (long i = 0; i < 8; i++) pthread_create(&all[i], NULL, work, (void *)(step * 8 + i));
        for (int i = 0; i < 8; i++) pthread_join(all[i], NULL);
        printf("%ld %lu\n", step, sum);
        fflush(stdout);
        usleep(150000);
    }
    for (int i = 0; i < 500; i++) free(kept[i]);
}
"""

_QUEUES = r"""
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/wait.h>
#include <unistd.h>

struct message { long type; char text[64]; };

static void answer(int queue, int done) {
    struct message got;
    struct sembuf up = {0, 1, 0};
    for (;;) {
        msgrcv(queue, &got, sizeof got.text, 1, 0);
        if (!strcmp(got.text, "end")) _exit(0);
        got.type = 2;
        strcat(got.text, "!");
        msgsnd(queue, &got, sizeof got.text, 0);
        semop(done, &up, 1);
    }
}

int main(void) {
    int queue = msgget(IPC_PRIVATE, 0600), done = semget(IPC_PRIVATE, 1, 0600);
    struct sembuf down = {0, -1, 0};
    struct message end = {1, "end"};
    if (!fork()) answer(queue, done);
    for (int step = 0; step < 60; step++) {
        struct message one = {1};
        snprintf(one.text, sizeof one.text, "step %d", step);
        msgsnd(queue, &one, sizeof one.text, 0);
        semop(done, &down, 1);
        msgrcv(queue, &one, sizeof one.text, 2, 0);
        printf("%d %s\n", step, one.text);
        fflush(stdout);
        usleep(150000);
    }
    msgsnd(queue, &end, sizeof end.text, 0);
    wait(NULL);
    msgctl(queue, IPC_RMID, 0);
    semctl(done, 0, IPC_RMID);
}
"""

_SQLITE = """
import hashlib, multiprocessing, os, sqlite3, time

def opened():
    return sqlite3.connect(os.environ["home"] + "/data/base", timeout=60, isolation_level=None)

def work(tasks, done):
    base = opened()
    while (task := tasks.get()) is not None:
        base.execute("BEGIN IMMEDIATE")
        rows = [(task * 100 + n, hashlib.sha256(b"%d" % (task * n)).hexdigest() * 5) for n in range(100)]
        base.executemany("INSERT INTO kept VALUES (?, ?)", rows)
        base.execute("COMMIT")
        done.put(task)

base = opened()
base.execute("PRAGMA journal_mode=WAL")
base.execute("CREATE TABLE kept (number INTEGER PRIMARY KEY, text TEXT)")
tasks, done = multiprocessing.Queue(), multiprocessing.Queue()
workers = [multiprocessing.Process(target=work, args=(tasks, done)) for _ in range(3)]
for one in workers: one.start()
for step in range(60):
    for part in range(3): tasks.put(step * 3 + part)
    for part in range(3): done.get()
    rows = base.execute("SELECT number, text FROM kept ORDER BY number").fetchall()
    print(step, len(rows), hashlib.sha256(repr(rows).encode()).hexdigest(), flush=True)
    time.sleep(0.15)
for _ in workers: tasks.put(None)
for one in workers: one.join()
"""

_PERL = r"""
use strict; use IO::Handle; use Socket; $| = 1;
my @peers;
for my $n (0..3) {
    socketpair(my $own, my $other, AF_UNIX, SOCK_STREAM, PF_UNSPEC);
    $own->autoflush; $other->autoflush;
    if (!fork) {
        close $own; my %kept;
        while (my $line = <$other>) {
            chomp $line; $kept{$line % 1000} .= "x$line"; print $other length(join '', values %kept) . "\n";
        }
        exit 0;
    }
    close $other; push @peers, $own;
}
for my $step (0..59) {
    my $sum = 0;
    for my $peer (@peers) { for (0..20) { print $peer $step * 21 + $_, "\n"; $sum += <$peer>; } }
    print "$step $sum\n";
    select undef, undef, undef, 0.15;
}
close $_ for @peers;
1 while wait > 0;
"""

_ERLANG = r"""
-module(main).
-export([main/0]).

keep(Kept) ->
    receive
        {From, N} ->
            Now = maps:put(N rem 500, erlang:md5(integer_to_binary(N)), Kept),
            From ! {self(), maps:size(Now)},
            keep(Now);
        stop -> ok
    end.

main() ->
    All = [spawn(fun() -> keep(#{}) end) || _ <- lists:seq(1, 8)],
    step(0, All),
    [One ! stop || One <- All],
    halt(0).

step(60, _) -> ok;
step(Step, All) ->
    Sum = lists:sum([begin One ! {self(), Step * 100 + N}, receive {One, Size} -> Size end end
                     || One <- All, N <- lists:seq(1, 50)]),
    io:format("~p ~p~n", [Step, Sum]),
    timer:sleep(150),
    step(Step + 1, All).
"""

_ASYNCIO = """
import asyncio, os
path = os.environ["home"] + "/socket"

async def serve(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()

async def main():
    await asyncio.start_unix_server(serve, path)
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    os.pidfd_open(child.pid)
    for step in range(60):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"%d\\n" % step)
        child.stdin.write(await reader.readline())
        writer.close()
        back = await child.stdout.readline()
        short = await asyncio.create_subprocess_exec("sh", "-c", f"echo $(({step} * 3))", stdout=-1)
        said, _ = await short.communicate()
        print(step, back, said, short.returncode, flush=True)
        await asyncio.sleep(0.1)
    child.stdin.close()
    await child.wait()

asyncio.run(main())
"""

_TERMINAL = """
import os, pty, select, time
pid, shell = pty.fork()
if pid == 0: os.execvp("bash", ["bash", "--norc", "-i"])
os.write(shell, b"stty -echo; PS1=; bind 'set enable-bracketed-paste off' 2>/dev/null\\n")
time.sleep(1)
while select.select([shell], [], [], 0.5)[0]: os.read(shell, 65536)
for step in range(60):
    os.write(shell, b"x=$((x * 7 + %d)); echo at:$((x %% 100000007)):\\n" % step)
    got = b""
    while not got.rstrip().endswith(b":") or b"at:" not in got: got += os.read(shell, 65536)
    print(step, got.split(b"at:")[1].split(b":")[0].decode(), flush=True)
    time.sleep(0.15)
os.write(shell, b"exit\\n")
os.waitpid(pid, 0)
"""

_EVENTS = """
import ctypes, fcntl, hashlib, mmap, os, select, signal, time
home, libc = os.environ["home"], ctypes.CDLL(None)
os.makedirs(home + "/watched", exist_ok=True)
class Times(ctypes.Structure): _fields_ = [(name, ctypes.c_long) for name in "abcd"]
watch = libc.inotify_init1(os.O_CLOEXEC)
assert libc.inotify_add_watch(watch, (home + "/watched").encode(), 0x300) > 0
lock = os.open(home + "/lock", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
count = os.eventfd(0)
timer = libc.timerfd_create(1, os.O_NONBLOCK)
libc.timerfd_settime(timer, 0, ctypes.byref(Times(0, 50_000_000, 0, 50_000_000)), None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signals = libc.signalfd(-1, ctypes.byref(ctypes.c_ulong(1 << signal.SIGUSR1 - 1)), 0)
poll = select.epoll()
for one in (watch, count, timer, signals): poll.register(one, select.EPOLLIN)
unnamed = os.open(home + "/gone", os.O_CREAT | os.O_RDWR)
os.unlink(home + "/gone")
memory = mmap.mmap(-1, 1 << 20)
for step in range(60):
    open(home + f"/watched/{step}", "w").close()
    os.unlink(home + f"/watched/{step}")
    os.eventfd_write(count, step + 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    seen = {}
    while len(seen) < 4:
        for one, _ in poll.poll():
            if one not in seen: seen[one] = os.read(one, 4096 if one == watch else 128 if one == signals else 8)
    os.pwrite(unnamed, b"%d" % step, step * 100)
    memory[step] = step
    print(step, int.from_bytes(seen[count], "little"), hashlib.sha256(os.pread(unnamed, 100000, 0) + memory[:]).hexdigest(), flush=True)
    time.sleep(0.1)
"""

_OCTAVE = """
kept = magic(300);
for step = 0:59
    kept = mod(kept * 3 + kept' * step, 1000);
    printf("%d %.0f\\n", step, sum(sum(kept .* (1:300))));
    fflush(stdout);
    pause(0.15);
end
"""

_MARIADB = """
socket=$home/socket
mariadbd --no-defaults --datadir="$home/data" --socket="$socket" --user=mysql --skip-networking \\
    --skip-grant-tables --pid-file="$home/data/pid" --innodb-buffer-pool-size=64M \\
    --innodb-use-native-aio=0 2>"$home/data/errors" &
until mariadb-admin --no-defaults -S "$socket" ping >"$home/ping" 2>&1; do sleep 0.1; done
echo 'CREATE DATABASE k; CREATE TABLE k.kept (number int PRIMARY KEY, text text)' |
    mariadb --no-defaults -S "$socket"
work() {
    for step in $(seq 0 59); do
        echo "INSERT INTO kept SELECT $step * 100 + seq, repeat(md5($step * seq), 20) FROM seq_1_to_100;"
        echo "SELECT $step, count(*), md5(group_concat(md5(text) ORDER BY number)) FROM kept;"
        sleep 0.15
    done
}
work | mariadb --no-defaults -S "$socket" -N -s -n k || exit 1
kill $(cat "$home/data/pid")
wait
"""


def _c(text: str, flags: str = "", run: str = "", needs: tuple[str, ...] = ()) -> Software:
    return Software(
        run or 'exec "$home/main"',
        ("gcc", *needs),
        f'gcc -O1 -g -pthread {flags} -o "$home/main" "$home/main.c"',
        {"main.c": text},
    )


def _python(text: str, data: str = "") -> Software:
    prepare = f'mkdir "$home/{data}"' if data else ""
    return Software('exec python3 "$home/main.py"', (), prepare, {"main.py": text}, data=data)


PARALLEL = {
    "mpi": Software(
        'exec mpirun --allow-run-as-root --oversubscribe -n 3 "$home/main"',
        ("mpirun", "mpicc"),
        'mpicc -O2 -o "$home/main" "$home/main.c"',
        {"main.c": _MPI},
        network=True,
    ),
    "openmp": _c(_OPENMP, "-fopenmp"),
    "address-sanitizer": _c(_THREADS, "-fsanitize=address"),
    "thread-sanitizer": _c(_THREADS, "-fsanitize=thread", 'exec setarch -R "$home/main"'),
    "queues": _c(_QUEUES),
    "sqlite": _python(_SQLITE, "data"),
    "perl": Software('exec perl "$home/main.pl"', ("perl",), files={"main.pl": _PERL}),
    "erlang": Software(
        'cd "$home" && exec erl -noinput -s main main',
        ("erl",),
        'cd "$home" && erlc main.erl',
        {"main.erl": _ERLANG},
        network=True,
    ),
    "asyncio": _python(_ASYNCIO),
    "terminal": _python(_TERMINAL),
    "events": _python(_EVENTS),
    "octave": Software(
        'exec octave-cli --no-gui --quiet "$home/main.m"',
        ("octave-cli",),
        files={"main.m": _OCTAVE},
    ),
    "mariadb": Software(
        _MARIADB,
        ("mariadbd", "mariadb"),
        'chown mysql "$home"; mariadb-install-db --no-defaults --user=mysql --datadir="$home/data" >"$home/made"',
        network=True,
        data="data",
    ),
}
