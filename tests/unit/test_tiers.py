"""Tiers below a KV cache: their configuration in vLLM, the files that are kept, and the removal of old files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm import keeper
from engine.vllm.command import command
from engine.vllm.keeper import SCRATCH, leads_to, remove
from engine.vllm.kept_files import KeptFiles
from engine.vllm.scratch import scratch
from engine.vllm.spec import EngineSpec
from engine.vllm.tier_folder import claim, remove_left
from engine.vllm.tiers import FOLDER_PREFIX, GIB, Tiers, folder_name


def transfer(tiers: Tiers | None, role: Role = Role.PREFILL) -> dict[str, object]:
    spec = EngineSpec(
        instance=InstanceId("p"), role=role, model="m", python="python", device="cpu", port=1, side_channel_port=2,
        connector="baton", door="/run/door", tiers=tiers,
    )  # fmt: skip
    words = command(spec)
    return dict(json.loads(words[words.index("--kv-transfer-config") + 1]))


@pytest.mark.parametrize("role", list(Role))
def test_tiers_stand_behind_the_connector_that_hands_over(role: Role) -> None:
    own = transfer(None, role)
    told = transfer(Tiers(host_bytes=3 * GIB, disk_bytes=7 * GIB, folder="/x/baton-kv-p"), role)
    assert told["kv_connector"] == "MultiConnector" and told["kv_role"] == own["kv_role"]
    assert told["kv_load_failure_policy"] == "recompute"
    first, second = told["kv_connector_extra_config"]["connectors"]  # type: ignore[index]
    assert first == own, "the connector that hands over is unchanged"
    extra = second["kv_connector_extra_config"]
    assert (second["kv_connector"], extra["cpu_bytes_to_use"]) == ("BatonOffloading", 3 * GIB)
    assert second["kv_connector_module_path"] == "engine.vllm.connector.tiers"
    (files,) = extra["secondary_tiers"]
    assert (files["root_dir"], files["limit_bytes"]) == ("/x/baton-kv-p", 7 * GIB)
    host = transfer(Tiers(host_bytes=GIB), role)["kv_connector_extra_config"]["connectors"][1]  # type: ignore[index]
    assert host["kv_connector_extra_config"]["secondary_tiers"] == []


@pytest.mark.parametrize(
    "given_", [{"host_bytes": 0, "disk_bytes": 1, "folder": "/x"}, {"host_bytes": 1, "disk_bytes": 1}]
)
def test_a_tier_that_vllm_cannot_have_is_refused(given_: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="a tier on disk needs"):
        Tiers(**given_)  # type: ignore[arg-type]


async def test_the_folder_of_a_tier_is_emptied_before_a_start_and_removed_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / f"{FOLDER_PREFIX}p-8100"
    folder.mkdir(parents=True)
    (folder / "old.bin").write_text("of other weights")
    async with scratch({"TMPDIR": str(tmp_path / ("x" * 60))}, str(folder)) as env:
        assert list(folder.iterdir()) == [] and folder.stat().st_mode & 0o777 == 0o700
        assert str(folder) in json.loads(env[SCRATCH]), "the keeper removes the folder if all other processes die"
        (folder / "new.bin").write_text("x")
    assert not folder.exists() and folder.parent.exists()


def on_this_machine(folder: Path, name: str) -> Path:
    return folder / folder_name(name, 1, os.uname().nodename)


def left_behind(folder: Path) -> Path:
    """What a killed engine leaves: its keeper was killed with it, as when a machine loses power."""
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.bin").write_text("x")
    return folder


def test_the_next_engine_removes_what_a_killed_one_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left, mine, other = (on_this_machine(tmp_path, name) for name in ("left", "mine", "other"))
    left_behind(left)
    (tmp_path / "elsewhere").mkdir()
    link = on_this_machine(tmp_path, "link")
    link.symlink_to(tmp_path / "elsewhere")
    with scratch({}, str(other)):
        (other / "b.bin").write_text("x")
        with scratch({}, str(mine)):
            assert not left.exists() and mine.exists()
            assert (other / "b.bin").exists(), "a living process has it"
            assert (tmp_path / "elsewhere").exists()
        assert (other / "b.bin").exists()
    assert sorted(tmp_path.iterdir()) == sorted([link, tmp_path / "elsewhere"])
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", f"{left}: removed 1 files of a KV cache that an engine has left there")
    ]


def test_what_another_machine_has_left_on_a_shared_disk_stays(tmp_path: Path) -> None:
    """Its engine may live: locks on a shared disk may be each machine's own."""
    other = left_behind(tmp_path / folder_name("left", 1, f"x{os.uname().nodename}"))
    with scratch({}, str(on_this_machine(tmp_path, "mine"))):
        assert (other / "deep" / "a.bin").exists()


def test_a_killed_process_holds_no_folder(tmp_path: Path) -> None:
    left, mine = on_this_machine(tmp_path, "left"), on_this_machine(tmp_path, "mine")
    lines = f"from engine.vllm.tier_folder import claim; claim({str(left)!r}); print('held', flush=True); input()"
    command = [sys.executable, "-c", lines]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with scratch({}, str(mine)):
            assert left.exists()
        process.kill()
        process.wait()
        with scratch({}, str(mine)):
            assert not left.exists()


def test_where_folders_cannot_be_locked_only_its_own_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("engine.vllm.tier_folder.fcntl.flock", none)
    left, mine = left_behind(on_this_machine(tmp_path, "left")), left_behind(on_this_machine(tmp_path, "mine"))
    with scratch({}, str(mine)):
        assert left.exists() and list(mine.iterdir()) == []
    assert left.exists() and not mine.exists()


def test_a_living_engines_folder_is_not_given_to_another_one(tmp_path: Path) -> None:
    """Two engines of one name and port: in two namespaces of a node, say."""
    folder = on_this_machine(tmp_path, "decode-0")
    first = claim(str(folder))
    (folder / "a.bin").write_text("x")
    with pytest.raises(
        UsageError, match=f"^--kv-disk-folder {tmp_path}: another engine has {folder}: .*--name or --po"
    ):
        claim(str(folder), wait_max_s=0.0)
    assert (folder / "a.bin").exists()
    os.close(first)
    os.close(claim(str(folder), wait_max_s=0.0))
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_removed_while_it_is_claimed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine beside it removes it as one that was left behind, between two steps of this one."""
    folder, flock = left_behind(on_this_machine(tmp_path, "mine")), fcntl.flock
    steps = [lambda: shutil.rmtree(folder), lambda: folder.rename(tmp_path / "old"), lambda: None]

    def removed_before(*what: int) -> None:
        steps.pop(0)()
        flock(*what)

    monkeypatch.setattr("engine.vllm.tier_folder.fcntl.flock", removed_before)
    held = claim(str(folder), wait_max_s=5.0)
    assert leads_to(str(folder), held) and steps == []
    os.close(held)


def test_a_folder_that_was_made_again_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is of the folder that the path led to before."""
    other, flock = left_behind(on_this_machine(tmp_path, "other")), fcntl.flock

    def made_again(*what: int) -> None:
        flock(*what)
        other.rename(tmp_path / "old")
        left_behind(other)

    monkeypatch.setattr("engine.vllm.tier_folder.fcntl.flock", made_again)
    remove_left(str(on_this_machine(tmp_path, "mine")))
    assert (other / "deep" / "a.bin").exists()


def test_each_of_three_engines_that_start_at_once_has_its_folder(tmp_path: Path) -> None:
    folders = [on_this_machine(tmp_path, name) for name in "abc"]

    def start(folder: Path) -> int:
        held = claim(str(folder))
        remove_left(str(folder))
        return held

    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            for folder in folders:
                left_behind(folder)
            held = list(threads.map(start, folders))
            found = [leads_to(str(folder), each) for folder, each in zip(folders, held, strict=True)]
            for folder, each in zip(folders, held, strict=True):
                remove(str(folder), each)
                os.close(each)
            assert found == [True] * 3


def test_a_killed_agents_keeper_does_not_remove_what_the_next_start_has(tmp_path: Path) -> None:
    """The agent holds the folder no more, and its keeper does so until it has removed it."""
    folder = on_this_machine(tmp_path, "mine")
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    agent = scratch({**os.environ, "TMPDIR": str(tmp_path / "none")}, str(folder))
    env = agent.__enter__()
    words = [sys.executable, "-I", "-S", keeper.__file__, sys.executable, "-c", stubborn]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=env, pass_fds=agent.descriptors) as kept:
        assert kept.stdin is not None and kept.stdout is not None and kept.stdout.readline() == b"up\n"
        for each in agent.descriptors:
            os.close(each)
        kept.stdin.close()  # as the kernel does at the agent's end
        with pytest.raises(UsageError, match="another engine has"):
            claim(str(folder), wait_max_s=0.0)
        held = claim(str(folder))
        (folder / "a.bin").write_text("x")
    assert (folder / "a.bin").exists() and leads_to(str(folder), held)
    os.close(held)


async def test_no_other_folder_is_ever_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="would be emptied"):
        async with scratch({}, str(tmp_path)):
            raise AssertionError
    assert (tmp_path / "mine").exists()


def test_files_used_longest_ago_go_first() -> None:
    kept = KeptFiles(3)
    assert kept.added("abc") == ()
    kept.written("abc")
    kept.used("c")
    assert kept.added("d") == ("b",)
    kept.used("b")
    assert kept.added("c") == () and kept.added("e") == ("a",)


def test_of_files_written_together_the_last_goes_first() -> None:
    """They are the chunks of one prompt, in its order: a chunk without those before it is of no use."""
    kept = KeptFiles(3)
    kept.added("abc")
    kept.written("abc")
    assert kept.added("d") == ("c",) and kept.added("e") == ("b",) and kept.added("f") == ("a",)


def test_a_file_that_is_being_written_stays() -> None:
    kept = KeptFiles(2)
    assert kept.added("abc") == ()
    kept.written("b")
    assert kept.added("d") == ("b",) and len(kept) == 3
    kept.written("acd")
    assert kept.added("e") == ("c", "a") and len(kept) == 2


def test_a_file_is_there_once_it_is_written_and_until_it_is_lost() -> None:
    kept = KeptFiles(3)
    kept.added("ab")
    assert "a" not in kept, "it is being written"
    kept.written("ab")
    assert "a" in kept and "b" in kept and "c" not in kept
    kept.added("a")
    assert "a" in kept, "it is whole until it is replaced"
    assert kept.lost("abc") == ("b",), "`a` will be whole, `c` is unknown"
    kept.written("a")
    assert "a" in kept and "b" not in kept and len(kept) == 1
    kept.added("c")
    kept.written("c")
    assert kept.lost("c") == ("c",) and "c" not in kept, "it could not be written"


@given(
    st.lists(st.tuples(st.sampled_from(["add", "use", "end", "lose"]), st.integers(0, 12)), max_size=80),
    st.integers(1, 5),
)
def test_at_most_the_bound_and_the_files_being_written_are_kept(steps: list[tuple[str, int]], most: int) -> None:
    kept, there, writing = KeptFiles(most), set[int](), list[int]()
    for what, key in steps:
        if what == "add":
            gone = kept.added((key,))
            writing.append(key)
            there.add(key)
            assert not set(gone) & set(writing)
            there -= set(gone)  # type: ignore[arg-type]
        elif what == "use":
            kept.used(key)
        elif what == "end" and key in writing:
            writing.remove(key)
            kept.written((key,))
        elif what == "lose":
            lost = kept.lost((key,))
            assert not set(lost) & set(writing)
            there -= set(lost)  # type: ignore[arg-type]
        assert len(kept) == len(there) <= most + len(set(writing))
        assert all(each in there for each in range(13) if each in kept)
