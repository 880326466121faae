"""Servers on one machine know of each other: whose memory is planned and not taken yet, and who is gone.

The other servers are files and a folder in place of /proc; only one test has a second process, which is killed.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks
from twostep.engine import build, other_servers
from twostep.engine.engine import Engine
from twostep.engine.host_memory import free_memory
from twostep.engine.other_servers import OtherServers, Registry, Server
from twostep.errors import MemoryPlanError
from twostep.model.loaded import LoadedModel, open_model

MIB = 1 << 20
ME = os.getpid()


@pytest.fixture
def model(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Of a system with this process, in a group of its own."""
    folder = tmp_path / "proc"
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to("pid:[77]")
    (folder / "self/cgroup").write_text("0::/mine\n")
    process(folder, ME, started=5)
    return folder


@pytest.fixture
def registry(tmp_path: Path, proc: Path) -> Registry:
    return Registry(tmp_path / "run", proc)


def process(proc: Path, pid: int, started: int, resident_mib: int = 0, group: str = "/mine", state: str = "S") -> None:
    """As the system describes it; its name has spaces and parentheses."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} (two) step (1) {state} " + "0 " * 18 + f"{started} 0 0\n")
    (folder / "status").write_text(f"Name:\tx\nRssAnon:\t{resident_mib << 10} kB\nRssFile:\t999 kB\nRssShmem:\t0 kB\n")
    (folder / "cgroup").write_text(f"0::{group}\n")


def planned(
    registry: Registry, pid: int, started: int, planned_mib: int, resident_mib: int = 0, space: int = 77
) -> Path:
    """The file of another server."""
    with registry.planning():
        pass
    path = registry._folder / f"{space}-{pid}.json"
    values = {"pid": pid, "started": started}
    values |= {"planned_bytes": planned_mib * MIB, "resident_bytes": resident_mib * MIB}
    path.write_text(json.dumps(values))
    return path


def seen(registry: Registry) -> OtherServers:
    with registry.planning() as others:
        return others


def test_no_other_server_is_nothing_to_say(registry: Registry) -> None:
    assert seen(registry) == OtherServers()
    assert list(OtherServers().lines()) == []


def test_what_is_planned_and_not_taken_yet_is_outstanding(registry: Registry, proc: Path) -> None:
    planned(registry, 40, started=9, planned_mib=1000, resident_mib=50)
    process(proc, 40, started=9, resident_mib=350)
    assert seen(registry).servers == (Server(40, 700 * MIB, same_group=True),)


def test_one_that_took_more_than_it_planned_owes_nothing(registry: Registry, proc: Path) -> None:
    planned(registry, 40, started=9, planned_mib=100)
    process(proc, 40, started=9, resident_mib=350, group="/other")
    assert seen(registry).servers == (Server(40, 0, same_group=False),)


@pytest.mark.parametrize("case", ["gone", "number used again", "zombie", "damaged", "not an object"])
def test_a_server_that_is_gone_is_ignored_and_its_file_removed(case: str, registry: Registry, proc: Path) -> None:
    path = planned(registry, 40, started=9, planned_mib=1000)
    match case:
        case "number used again":
            process(proc, 40, started=10)
        case "zombie":
            process(proc, 40, started=9, state="Z")
        case "damaged":
            process(proc, 40, started=9)
            path.write_text('{"pid": 40, "star')
        case "not an object":
            path.write_text("[]")
    assert seen(registry) == OtherServers()
    assert not path.exists()


def test_files_of_another_namespace_are_left_alone(registry: Registry, proc: Path) -> None:
    """Containers that share a folder: the number means another process there."""
    path = planned(registry, 40, started=9, planned_mib=1000, space=78)
    process(proc, 40, started=9)
    assert seen(registry) == OtherServers()
    assert path.exists()


def test_a_registered_server_is_seen_by_others_until_it_closes(registry: Registry, proc: Path) -> None:
    with registry.planning():
        registration = registry.register(300 * MIB)
    assert registration is not None
    assert seen(registry).servers == (), "not by itself"
    [path] = registry._folder.glob("77-*")
    assert json.loads(path.read_text()) == {
        "pid": ME,
        "started": 5,
        "planned_bytes": 300 * MIB,
        "resident_bytes": 0,
    }
    registration.close()
    assert list(registry._folder.glob("77-*")) == []


SERVER = """
import sys, time
from pathlib import Path
from twostep.engine.other_servers import Registry
registry = Registry(Path(sys.argv[1]))
with registry.planning():
    registry.register(1 << 40)
print(flush=True)
time.sleep(600)
"""


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    """In the real /proc: seen while it lives, neither seen nor on disk after it was killed."""
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        [server] = seen(Registry(folder)).servers
        assert server.pid == other.pid
        assert 0.9 * (1 << 40) < server.outstanding_bytes <= 1 << 40
        other.kill()
    assert seen(Registry(folder)) == OtherServers()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_no_two_plan_at_the_same_time(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds the lock for ever is named, and stops nobody."""
    monkeypatch.setattr(other_servers, "LOCK_WAIT_S", 0.05)
    with registry.planning() as first, registry.planning() as second:
        assert first.fault is None
        assert second.fault is not None
        assert "another server has locked the folder" in second.fault
    assert seen(registry).fault is None, "released"
    lock = os.open(registry._folder / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def unmakeable(folder: Path) -> None:
    folder.write_text("a file")


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    folder.with_name("elsewhere").mkdir()
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize("make", [unmakeable, open_to_all, a_link])
def test_a_folder_that_cannot_be_used_is_said_and_stops_nobody(
    make: Callable[[Path], None], tmp_path: Path, proc: Path
) -> None:
    make(tmp_path / "run")
    others = seen(Registry(tmp_path / "run", proc))
    assert others.servers == ()
    [line] = others.lines()
    assert line.startswith(f"note: other twostep servers on this machine cannot be seen: {tmp_path / 'run'}: ")


def test_the_folder_is_the_users_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert other_servers.runtime_folder() == tmp_path / "twostep"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert other_servers.runtime_folder().name == f"twostep-{os.getuid()}"


def test_planned_memory_of_others_is_not_free(tmp_path: Path) -> None:
    """On the machine; a limit of a control group only counts those in the same one."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:  4194304 kB\n")
    inside, outside = Server(1, 500 * MIB, same_group=True), Server(2, 1000 * MIB, same_group=False)
    assert free_memory(tmp_path, [inside, outside]) == 2596 * MIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(2000 * MIB))
    (group / "memory.current").write_text(str(100 * MIB))
    assert free_memory(tmp_path, [inside, outside]) == 1400 * MIB
    assert free_memory(tmp_path, [Server(1, 1 << 50, same_group=True)]) == 0


def test_start_says_who_else_is_there(model: LoadedModel) -> None:
    others = OtherServers((Server(40, 3 * MIB, same_group=True), Server(41, 0, same_group=True)))
    config = EngineConfig(kv_memory=MemoryBlocks(16), max_num_seqs=2, max_model_len=64)
    first, *_ = build.size(model, config, others=others).lines(config)
    assert first == (
        "note: 2 other twostep servers of this user on this machine (process 40, 41); 3.0 MiB planned there and not in "
        "use yet do not count as free; cores are shared"
    )


def test_an_error_for_lack_of_memory_names_the_others(model: LoadedModel) -> None:
    others = OtherServers((Server(40, 1 << 50, same_group=True),))
    with pytest.raises(MemoryPlanError, match=r"1 other twostep server of this user .* \(process 40\)"):
        build.size(model, EngineConfig(), others=others)


@pytest.mark.parametrize("serves", [True, False])
def test_only_an_engine_of_a_server_registers(
    serves: bool, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = EngineConfig(kv_memory=MemoryBlocks(16), max_num_seqs=2, max_model_len=64)
    engine = Engine(model, config, serves=serves)
    files = list((tmp_path / "twostep").glob("*.json"))
    assert len(files) == serves
    if serves:
        assert json.loads(files[0].read_text())["planned_bytes"] == engine.sizing.engine_bytes
        assert engine.sizing.engine_bytes < engine.sizing.memory.demand.fixed_bytes + engine.sizing.memory.kv_bytes
    engine.close()
    assert list((tmp_path / "twostep").glob("*.json")) == []
