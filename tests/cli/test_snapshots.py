"""Snapshots of real jobs through the command line and the Python API: dump, list, compare, restore,
forget, collect.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import icecore
from icecore.config import Config
from icecore.errors import NotFound, UsageError
from tests.cli.conftest import Cli, until
from tests.cli.documents import check_event, documented_events
from tests.restorer.job_file_places import written
from tests.restorer.killed_put_back import NEWER, THEN, lay_out

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

#: Counts on stdout; ends with status 9 once a file appears.
COUNT = [
    "/bin/sh",
    "-c",
    "i=0; while ! [ -e finish ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 9",
]


def start(cli: Cli, *options: str) -> None:
    """Make a repository and start a counting job named count."""
    cli.run("init")
    cli.run("run", "-d", "--name", "count", *options, "--", *COUNT)
    until(lambda: counted(cli) >= 5, "counting")


def counted(cli: Cli, name: str = "count") -> int:
    """Return how far a job has counted; assert that its lines are 1, 2, 3 …"""
    lines = (cli.job(name).directory / "stdout.log").read_text().split("\n")[:-1]
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    return len(lines)


def test_the_whole_way(cli: Cli) -> None:
    start(cli)
    documented = documented_events()
    first = cli.events("dump", "count", "--tag", "one")
    until(lambda: counted(cli) >= 15, "still counting")
    second = cli.events("dump", "count", "--pin")
    done = [
        next(event for event in events if event["event"] == "dump.done")
        for events in (first, second)
    ]
    ids = [event["snapshot"] for event in done]
    assert [event["parent"] for event in done] == ["", ids[0]]
    listed = cli.events("ls")
    assert [(event["snapshot"], event["tags"], event["pinned"]) for event in listed] == [
        (ids[0], ["one"], False),
        (ids[1], [], True),
    ]
    assert cli.events("ls", "--tag", "one")[0]["snapshot"] == ids[0]
    assert "no job 'nobody'" in cli.run("ls", "nobody", status=3).stderr
    assert (
        "no job 'nobody'"
        in cli.run("forget", "--job", "nobody", "--keep-last", "1", status=3).stderr
    )
    assert cli.events("ls", "count", "--tag", "none such") == []

    shown = cli.events("show", "count~1")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in shown:
        by_name.setdefault(event["event"], []).append(event)
    assert by_name["snapshot"][0]["snapshot"] == ids[0]
    assert by_name["snapshot.details"][0]["own_namespaces"] == ["pid", "ipc"]
    assert by_name["snapshot.details"][0]["device_bytes"] == 0
    assert [event["pid"] for event in by_name["snapshot.process"]][:2] == [1, 2]
    assert any(
        event["path"].endswith("stdout.log") and event["writable"]
        for event in by_name["snapshot.file"]
    )
    differing = cli.events("diff", "count")
    assert {event["event"] for event in differing} >= {"diff.region", "diff.total", "diff.file"}
    changed = [
        event["path"]
        for event in differing
        if event["event"] == "diff.file" and event["state"] == "changed"
    ]
    assert changed == [str(cli.job("count").directory / "stdout.log")]
    process = next(
        event
        for event in differing
        if event["event"] == "diff.total" and event["space"] == "process"
    )
    assert 0 < process["changed"] <= process["logical"]

    stopped = cli.events("dump", "count", "--stop")
    until(lambda: not cli.job("count").alive, "stopped")
    at_end = counted(cli)
    cli.run("restore", "--dry-run", "latest")
    requirements = cli.events("restore", "-n", "latest")
    restored = cli.events("restore", "latest")
    until(lambda: counted(cli) > at_end, "going on")
    assert cli.job("count").description.restored_from == stopped[-1]["snapshot"]
    again = cli.one("dump.done", "dump", "count")
    assert again["parent"] == stopped[-1]["snapshot"]
    (cli.folder / "finish").touch()
    ended = cli.one("job.ended", "wait", "count", status=9)
    assert ended["how"] == "exited 9"
    for event in [*first, *second, *shown, *differing, *stopped, *requirements, *restored, *listed]:
        check_event(event, documented)


def _listed_file(cli: Cli, path: Path) -> dict[str, Any]:
    """Return the event of the only file that a dry run of the job `writer` lists."""
    # Other tests' empty directories in /tmp may be taken for the job's.
    files = [
        event
        for event in cli.events("restore", "-n", "writer")
        if event["event"] == "restore.file" and event["action"] != "directory"
    ]
    assert [event["path"] for event in files] == [str(path)], files
    return files[0]


def test_a_dry_run_lists_the_files_that_would_change_and_changes_none(cli: Cli) -> None:
    cli.run("init")
    kept = cli.folder / "kept"
    kept.write_bytes(b"then\n")
    words = [
        sys.executable,
        "-c",
        "import sys, time; f = open(sys.argv[1], 'r+b'); print('there', flush=True); time.sleep(1000)",
        str(kept),
    ]
    cli.run("run", "-d", "--name", "writer", "--", *words)
    until(lambda: "there" in (cli.job("writer").directory / "stdout.log").read_text(), "there")
    cli.run("dump", "writer", "--stop")
    until(lambda: not cli.job("writer").alive, "stopped")
    then = kept.stat().st_mtime
    kept.write_bytes(b"newer and longer\n")
    os.utime(kept, (1e9, 1e9))
    listed = _listed_file(cli, kept)
    check_event(listed, documented_events())
    shown = {
        key: listed[key]
        for key in ("path", "action", "bytes_now", "bytes_then", "mtime_now", "mtime_then")
    }
    expected = {
        "path": str(kept),
        "action": "replace",
        "bytes_now": 17,
        "bytes_then": 5,
        "mtime_now": 1e9,
        "mtime_then": pytest.approx(then),
    }
    assert shown == expected
    text = cli.run("restore", "-n", "writer").stdout
    assert (
        "files that would change" in text
        and str(kept) in text
        and "17 B" in text
        and "2001-09-09" in text
    )
    assert kept.read_bytes() == b"newer and longer\n"
    kept.unlink()
    listed = _listed_file(cli, kept)
    assert (listed["action"], listed["bytes_now"], listed["mtime_now"]) == ("create", None, None)


def test_the_next_command_puts_right_what_a_killed_restore_left(cli: Cli) -> None:
    home = cli.folder / "killed"
    home.mkdir()
    back = written(lay_out(home), THEN, cli.folder / "state")
    back.exchange()
    assert back.journal is not None
    back.journal.close()  # as if its process had been killed
    (event,) = [event for event in cli.events("ps") if event["event"] == "restore.recovered"]
    check_event(event, documented_events())
    assert (event["how"], event["left"]) == ("undone", [])
    assert (home / "home" / "replaced").read_bytes() == NEWER
    assert "restore.recovered" not in [event["event"] for event in cli.events("ps")]


def test_text_for_people(cli: Cli) -> None:
    start(cli)
    done = cli.run("dump", "count")
    assert "count: stood still" in done.stdout
    assert "window" in done.stderr and "committing" in done.stderr
    assert cli.run("dump", "-q", "count").stderr == ""
    table = cli.run("ls").stdout.splitlines()
    assert table[0].split()[:2] == ["SNAPSHOT", "JOB"] and len(table) == 3
    shown = cli.run("show", "latest").stdout
    assert "device memory" in shown and "/bin/sh" in shown and "host memory" in shown
    compared = cli.run("diff", "count@1", "count@2").stdout
    assert "bytes count by whole cells of 1.0 MiB" in compared
    cli.run("kill", "count", "-s", "KILL")
    assert "count runs as process" in cli.run("restore", "count", "--mode", "lazy").stdout


def test_several_instances_at_once(cli: Cli) -> None:
    start(cli)
    cli.run("dump", "count", "--stop")
    for name in ("count", "twin", "third"):
        cli.run("restore", "count", "--name", name)
    assert {event["job"] for event in cli.events("ps")} == {"count", "twin", "third"}
    before = {name: counted(cli, name) for name in ("count", "twin", "third")}
    for name, count in before.items():
        until(lambda name=name, count=count: counted(cli, name) > count, f"{name} goes on")  # type: ignore[misc]
    taken = cli.one("dump.done", "dump", "twin")
    assert taken["job"] == "twin"
    assert taken["parent"] == cli.events("ls", "count")[0]["snapshot"]


def test_restored_in_the_foreground(cli: Cli) -> None:
    start(cli)
    cli.run("dump", "count", "--stop")
    attached = cli.start("restore", "--attach", "count")
    until(
        lambda: cli.job("count").alive and cli.job("count").description.restored_from != "",
        "restored",
    )
    count = counted(cli)
    until(lambda: counted(cli) > count, "going on")
    (cli.folder / "finish").touch()
    out, error = attached.communicate(timeout=30)
    assert attached.returncode == 9, error
    assert "runs as process" in out


def test_what_a_restored_job_writes_before_it_is_followed_is_shown(cli: Cli) -> None:
    """The job may have ended by then. What its logs held at the time of the snapshot is not shown
    again.
    """
    cli.run("init")
    cli.run(
        "run",
        "-d",
        "--name",
        "brief",
        "--",
        "/bin/sh",
        "-c",
        "echo early; while ! [ -e go ]; do sleep 0.02; done; echo late; echo why >&2; exit 5",
    )
    until(lambda: (cli.job("brief").directory / "stdout.log").read_text() == "early\n", "started")
    cli.run("dump", "brief", "--stop")
    (cli.folder / "go").touch()
    for number, mode in enumerate(("full", "lazy")):
        done = cli.run(
            "restore",
            "-a",
            "brief",
            "--name",
            f"brief{number}",
            "--mode",
            mode,
            "--after",
            "sleep 1",
            status=5,
        )
        assert done.stdout.splitlines()[-1] == "late" and "early" not in done.stdout
        assert "why\n" in done.stderr


def test_hooks(cli: Cli) -> None:
    start(cli)
    say = "echo $ICECORE_JOB $ICECORE_PID ${ICECORE_SNAPSHOT:-none} >> hooks"
    done = cli.one("dump.done", "dump", "count", "--before", say, "--after", say)
    pid = cli.job("count").pid
    assert (
        cli.folder / "hooks"
    ).read_text() == f"count {pid} none\ncount {pid} {done['snapshot']}\n"
    failed = cli.events("dump", "count", "--before", "exit 3", status=5)
    assert "exit 3" in failed[-1]["message"]
    assert len(cli.events("ls")) == 1 and cli.job("count").alive
    failed = cli.events("dump", "count", "--after", "exit 3", status=1)
    assert failed[-1]["class"] == "HookFailed"
    listed = [event["snapshot"] for event in cli.events("ls")]
    assert len(listed) == 2 and cli.one("job", "ps")["snapshot"] == listed[-1]
    done = cli.one("dump.done", "dump", "count")
    assert done["parent"] == listed[-1]
    cli.run("kill", "count", "-s", "KILL")
    (cli.folder / "hooks").unlink()
    events = cli.events("restore", "count", "--after", say)
    assert (
        cli.folder / "hooks"
    ).read_text() == f"count {cli.job('count').pid} {done['snapshot']}\n"
    assert any(event["event"] == "hook" and event["state"] == "end" for event in events)
    assert cli.job("count").alive
    failing = cli.run(
        "restore", "count", "--name", "other", "--after", "echo why >&2; exit 4", status=1
    )
    assert "ended with status 4" in failing.stderr and "why" in failing.stderr
    assert cli.job("other").alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words", [("dump", "--before"), ("dump", "--after"), ("restore", "--after")]
)
def test_an_interrupted_hook_ends_with_all_that_it_started(
    cli: Cli, words: tuple[str, str], number: signal.Signals
) -> None:
    command, when = words
    start(cli)
    if command == "restore":
        cli.run("dump", "count", "--stop")
    running = cli.start(command, "count", when, "echo said >&2; sleep 300 & echo $! > begun; wait")
    begun = cli.folder / "begun"
    until(lambda: begun.exists() and begun.read_text().endswith("\n"), "begun")
    running.send_signal(number)
    _, error = running.communicate(timeout=30)
    assert running.returncode == 128 + number, error
    until(lambda: not Path(f"/proc/{begun.read_text().strip()}").exists(), "ended")
    assert cli.job("count").alive
    assert command == "dump" or "said" in error


def test_a_hook_may_leave_something_in_the_background_and_sees_no_secret(cli: Cli) -> None:
    start(cli)
    before = "sleep 300 & echo $! > left; echo ${ICECORE_PASSPHRASE:-none} > secret"
    cli.run("dump", "count", "--before", before, ICECORE_PASSPHRASE="a secret")
    left = int((cli.folder / "left").read_text())
    try:
        assert Path(f"/proc/{left}").exists()
        assert (cli.folder / "secret").read_text() == "none\n"
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_job_whose_memory_is_on_its_way_outlives_a_failing_hook(cli: Cli) -> None:
    """Until all its memory is loaded, the job would die with the command."""
    program = "import os, time\nmemory = [os.urandom(1 << 20) for _ in range(256)]\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"
    cli.run("init")
    cli.run("run", "-d", "--name", "large", "--", sys.executable, "-c", program)
    until(lambda: (cli.job("large").directory / "stdout.log").read_text() == "ready\n", "ready")
    cli.run("dump", "large", "--stop")
    events = cli.events("restore", "large", "--mode", "lazy", "--after", "exit 4", status=1)
    assert events[-1]["class"] == "HookFailed", events
    assert [
        event["event"]
        for event in events
        if event["event"] in ("restore.running", "restore.resident", "restore.failed")
    ] == [
        "restore.running",
        "restore.resident",
    ]
    assert cli.job("large").alive


def test_what_was_no_job_gets_no_name(cli: Cli) -> None:
    cli.run("init")
    process = subprocess.Popen(
        ["/bin/sleep", "300"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        cli.run("dump", str(process.pid), "--stop", "--job", "sleeper")
        process.wait(30)
    finally:
        process.kill()
    for words in ((), ("-n",)):
        for option in ("--workdir", "--root"):
            assert (
                f"{option} /no/where: there is no such directory"
                in cli.run("restore", "sleeper", option, "/no/where", *words, status=2).stderr
            )
        done = cli.run("restore", "sleeper", "--name", "other", *words, status=2)
        assert "could be named other" in done.stderr and "leave out --name" in done.stderr
    assert not Path(f"/proc/{process.pid}").exists()


def test_refusals_come_before_anything_is_stopped(cli: Cli) -> None:
    start(cli)
    assert "there is no process" in cli.run("dump", "999999999", status=3).stderr
    assert "there is no job" in cli.run("dump", "nobody", status=3).stderr
    assert "is no name for a job" in cli.run("dump", "count", "--job", "x/../y", status=2).stderr
    assert (
        "--workdir /no/where: there is no such directory"
        in cli.run("dump", "count", "--workdir", "/no/where", status=2).stderr
    )
    done = cli.run("dump", str(os.getpid()), status=4)
    assert "self: the tree" in done.stderr and "cure:" in done.stderr
    error = cli.events("dump", "2", status=4)[-1]
    assert [reason["name"] for reason in error["reasons"]] == ["kernel-thread"]
    assert "of the configuration" not in done.stderr
    done = cli.run("dump", "count", "--max-window", "1ms", status=5)
    assert "cure: raise --max-window" in done.stderr
    assert cli.events("ls") == []
    count = counted(cli)
    until(lambda: counted(cli) > count, "going on")
    assert cli.one("check.done", "check", "--read-data")["sound"]


def test_a_process_of_a_job_means_the_job(cli: Cli) -> None:
    start(cli)
    inner = cli.job("count").main_process()
    assert cli.one("dump.done", "dump", str(inner))["job"] == "count"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_dump_leaves_the_job_running(cli: Cli, number: signal.Signals) -> None:
    def folders() -> set[Path]:
        return set(Path("/dev/shm").glob("icecore-dump-*"))

    start(cli)
    others = folders()
    dump = cli.start("--json", "dump", "count", "--before", "sleep 0.2")
    assert dump.stdout is not None
    for line in dump.stdout:
        if json.loads(line)["event"] == "dump.window":
            break
    dump.send_signal(number)
    out, _ = dump.communicate(timeout=30)
    finished = '"dump.done"' in out  # before it was reported
    assert finished or dump.returncode in (-signal.SIGKILL, 130)
    count = counted(cli)
    until(lambda: counted(cli) > count, "going on")
    if number == signal.SIGINT and not finished:
        assert cli.events("ls") == []
    assert cli.one("check.done", "check", "--read-data")["sound"]
    mine = folders() - others
    until(lambda: not [path for path in mine if path.exists()], "cleaned up")


def test_an_interrupted_restore_leaves_nothing(cli: Cli) -> None:
    start(cli)
    cli.run("dump", "count", "--stop")
    restore = cli.start("--json", "restore", "count")
    assert restore.stdout is not None
    for line in restore.stdout:
        if json.loads(line)["event"] == "restore.images":
            break
    restore.send_signal(signal.SIGINT)
    out, _ = restore.communicate(timeout=30)
    finished = any(json.loads(line)["event"] == "restore.resident" for line in out.splitlines())
    running = cli.events("ps")
    # It may finish before the signal; both outcomes are complete.
    assert (restore.returncode, len(running)) == (130, 0) or finished, out
    if not finished:
        cli.run("restore", "count")
    assert cli.job("count").alive


def test_forgetting_and_collecting(cli: Cli) -> None:
    start(cli)
    ids = [cli.one("dump.done", "dump", "count")["snapshot"] for _ in range(4)]
    cli.run("mark", ids[0], "--pin", "--tag", "release")
    decisions = cli.events("forget", "--keep-last", "1", "--dry-run")
    assert [event["keep"] for event in decisions[:-1]] == [True, False, False, True]
    assert int(str(decisions[-1]["free_bytes"])) > 0
    assert len(cli.events("ls")) == 4
    done = cli.one("forget.done", "forget", "--keep-last", "1")
    assert (done["kept"], done["forgotten"]) == (2, 2)
    assert "pinned" in cli.run("forget", ids[0], status=2).stderr
    assert [event["snapshot"] for event in cli.events("ls")] == [ids[0], ids[3]]
    plan = cli.one("gc.plan", "gc", "--dry-run")
    freed = cli.one("gc.done", "gc")
    assert plan["delete"] > 0 and freed["deleted"] > 0
    assert cli.one("check.done", "check", "--read-data")["sound"]
    assert "no tag 'relaese'" in cli.run("mark", ids[0], "--untag", "relaese").stderr
    assert "not a tag" in cli.run("mark", ids[0], "--tag", " ", status=2).stderr
    marked = cli.run("mark", ids[0], "--no-pin", "--untag", "release")
    assert "no tags" in marked.stdout and not marked.stderr
    cli.run("forget", ids[0])
    cli.run("kill", "count", "-s", "KILL")
    cli.run("gc")
    cli.run("restore", "count")
    assert cli.job("count").alive


def test_damage_is_named_and_costs_what_it_costs(cli: Cli) -> None:
    start(cli)
    taken = cli.one("dump.done", "dump", "count", "--stop")["snapshot"]
    shard = max(
        (cli.folder / "repository" / "shards").rglob("*/*"), key=lambda path: path.stat().st_size
    )
    shard.chmod(0o600)
    data = bytearray(shard.read_bytes())
    data[100] ^= 4
    shard.write_bytes(data)
    events = cli.events("check", "--read-data", status=9)
    finding = next(event for event in events if event["event"] == "check.finding")
    assert finding["snapshots"] == [taken]
    for event in events:
        check_event(event, documented_events())
    assert "DAMAGED" in cli.run("check", "--read-data", status=9).stdout
    replica = cli.folder / "replica"
    shutil.copytree(cli.folder / "repository", replica)
    healthy = replica / shard.relative_to(cli.folder / "repository")
    data[100] ^= 4
    healthy.write_bytes(data)
    assert cli.run("restore", "count", status=9).stderr
    assert cli.events("ps") == []

    assert cli.one("repair.done", "repair", "--dry-run", "--from", str(replica))["quarantined"] == 0
    assert cli.one("repair.loss", "repair", "--dry-run", status=9)["snapshot"] == taken
    assert cli.events("ls")[0]["quarantined"] == ""
    events = cli.events("repair", status=9)
    for event in events:
        check_event(event, documented_events())
    assert cli.events("ls")[0]["quarantined"] and "QUARANTINED" in cli.run("ls").stdout
    assert cli.one("check.done", "check", "--read-data")["quarantined"] == 1
    assert "repair --from" in cli.run("restore", "count", status=9).stderr
    events = cli.events("repair", "--from", str(replica))
    assert {"repair.fix", "repair.release", "repair.done"} <= {
        str(event["event"]) for event in events
    }
    assert cli.one("check.done", "check", "--read-data")["quarantined"] == 0
    cli.run("gc")
    found = cli.events("stats")
    for event in found:
        check_event(event, documented_events())
    assert found[-1]["snapshots"] == 1 and int(str(found[-1]["live"])) > 0
    assert "count" in cli.run("stats").stdout
    cli.run("restore", "count")
    assert cli.job("count").alive


def test_python_api(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cli.folder)
    config = Config(repository=str(cli.folder / "repository"), state=str(cli.folder / "state"))
    with icecore.Repository.create(config.repository, state=config.state) as repository:
        seen: list[icecore.Event] = []
        job = icecore.run(COUNT, name="count", config=config)
        until(lambda: counted(cli) >= 3, "counting")
        one = icecore.dump(job.name, repository, config=config, emit=seen.append)
        two = icecore.dump(job.pid, repository, icecore.DumpOptions(stop=True), config=config)
        assert (one.parent, two.parent) == ("", one.snapshot)
        assert any(event.name == "dump.window" for event in seen)
        assert job.wait(10).signal == signal.SIGKILL
        assert [record.snapshot for record in repository.snapshots(job="count")] == [
            one.snapshot,
            two.snapshot,
        ]
        assert repository.find("count~1").snapshot == one.snapshot
        assert repository.manifest("count").processes[0].image_id == 1
        assert repository.diff(one.snapshot, two.snapshot).newer == two.snapshot
        found = icecore.check_restore("count", repository, config=config)
        assert found.failed == []
        restored = icecore.restore("count", repository, config=config)
        assert restored.job is not None and restored.job.alive
        restored.wait_resident(10)
        restored.job.kill(signal.SIGKILL)
        restored.job.wait(10)
        # By location and lazily, so that loading continues after the call.
        lazy = icecore.restore("count", options=icecore.RestoreOptions(mode="lazy"), config=config)
        assert lazy.wait_resident(20) > 0
        (cli.folder / "finish").touch()
        assert lazy.wait(10).code == 9
        assert repository.check(read_data=1.0).sound
        assert [one.keep for one in repository.plan_forget(icecore.Policy(last=1))] == [False, True]
        assert [record.snapshot for record in repository.forget([one.snapshot])] == [one.snapshot]
        repository.gc()
        with pytest.raises(NotFound):
            repository.find(one.snapshot)
        assert repository.update("count", pinned=True, tags=["x"]).tags == ["x"]
    with pytest.raises(UsageError, match="no repository"):
        icecore.dump("count", config=Config(state=config.state))


def test_imported_images_are_snapshots(cli: Cli, tmp_path: Path) -> None:
    import subprocess

    from icecore.host.criu.program import find_criu

    images = tmp_path / "images"
    images.mkdir()
    sleeper = subprocess.Popen(
        ["sleep", "1000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        criu = [
            str(find_criu().path),
            "dump",
            "-t",
            str(sleeper.pid),
            "-D",
            str(images),
            "--leave-running",
            "--network-lock",
            "skip",
        ]
        subprocess.run(criu, check=True, capture_output=True, timeout=60)
    finally:
        sleeper.kill()
        sleeper.wait(10)
    cli.run("init")
    events = cli.events("import", str(images), "--job", "sleeper", "--tag", "old")
    for event in events:
        check_event(event, documented_events())
    assert cli.events("ls")[0]["tags"] == ["old"]
    assert "is no image directory" in cli.run("import", str(tmp_path), status=3).stderr
