"""Tiers below a KV cache: their configuration in vLLM, the files that are kept, and the removal of old files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm.command import command
from engine.vllm.keeper import SCRATCH
from engine.vllm.kept_files import KeptFiles
from engine.vllm.scratch import scratch
from engine.vllm.spec import EngineSpec
from engine.vllm.tiers import FOLDER_PREFIX, GIB, Tiers


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
        assert json.loads(env[SCRATCH])[-1] == str(folder), "the keeper removes the folder if all other processes die"
        (folder / "new.bin").write_text("x")
    assert not folder.exists() and folder.parent.exists()


def test_the_next_engine_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """Its keeper was killed with it: a machine lost power, or a container was killed whole."""
    left, mine, other = (tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("left-1", "mine-2", "other-3"))
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "a.bin").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{FOLDER_PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with scratch({}, str(other)):
        (other / "b.bin").write_text("x")
        with scratch({}, str(mine)):
            assert not left.exists() and mine.exists()
            assert (other / "b.bin").exists(), "a living process has it"
            assert (tmp_path / "elsewhere").exists()
        assert (other / "b.bin").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["baton-kv-link", "elsewhere"]


def test_a_killed_process_holds_no_folder(tmp_path: Path) -> None:
    left, mine = tmp_path / f"{FOLDER_PREFIX}left", tmp_path / f"{FOLDER_PREFIX}mine"
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
    left, mine = tmp_path / f"{FOLDER_PREFIX}left", tmp_path / f"{FOLDER_PREFIX}mine"
    left.mkdir()
    with scratch({}, str(mine)):
        assert left.exists() and mine.exists()
    assert left.exists() and not mine.exists()


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
