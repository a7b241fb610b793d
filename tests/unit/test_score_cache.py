"""The table of paid scores: what is kept, by whom it may be used, and what a broken file costs."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from surefoot.reward.cache import FILE, ScoreCache, content_key, default_path


def test_a_value_comes_back_in_this_and_in_a_later_process(tmp_path):
    path = tmp_path / "deep" / "scores.sqlite3"
    with ScoreCache(path) as cache:
        assert cache.get("a") is None
        cache.put("a", {"value": 0.5, "detail": "naïve 😀 \ud800"})
        cache.put("b", {"value": None})
        assert cache.get("a") == {"value": 0.5, "detail": "naïve 😀 \ud800"}
    with ScoreCache(path) as later:
        assert later.get("a") == {"value": 0.5, "detail": "naïve 😀 \ud800"}
        assert later.get("b") == {"value": None}
        later.put("a", {"value": 1.0})
        assert later.get("a") == {"value": 1.0}
    assert later.get("a") == {"value": 1.0}, "a closed cache opens its file again"
    later.close()


def test_the_default_place_is_beside_the_other_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    assert default_path() == tmp_path / FILE
    with ScoreCache() as cache:
        cache.put("a", {"value": 1.0})
    assert (tmp_path / FILE).is_file()


def test_a_number_that_is_not_json_is_refused(tmp_path):
    with ScoreCache(tmp_path / "s") as cache, pytest.raises(ValueError, match="JSON"):
        cache.put("a", {"value": float("nan")})


def test_the_key_reads_content_and_not_order():
    key = content_key({"prompt": "p", "text": "t", "columns": {"a": 1, "b": [1, 2]}})
    assert key == content_key({"columns": {"b": (1, 2), "a": 1}, "text": "t", "prompt": "p"})
    assert len(key) == 64
    others = [
        {"prompt": "p", "text": "t", "columns": {"a": 1, "b": [2, 1]}},
        {"prompt": "p", "text": "t", "columns": {"a": True, "b": [1, 2]}},
        {"prompt": "pt", "text": "", "columns": {"a": 1, "b": [1, 2]}},
        {"prompt": "p", "text": "t"},
    ]
    assert len({key, *map(content_key, others)}) == 5


def test_threads_share_one_cache(tmp_path):
    with ScoreCache(tmp_path / "s") as cache:

        def work(start: int) -> None:
            for n in range(start, start + 25):
                cache.put(str(n), {"value": n})
                assert cache.get(str(n)) == {"value": n}

        threads = [threading.Thread(target=work, args=(25 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [cache.get(str(n)) for n in range(100)] == [{"value": n} for n in range(100)]


def test_processes_write_the_same_file_at_the_same_time(tmp_path):
    path = tmp_path / "s"
    program = (
        "import sys\nfrom pathlib import Path\nfrom surefoot.reward.cache import ScoreCache\n"
        "with ScoreCache(Path(sys.argv[1])) as cache:\n"
        "    for n in range(40):\n"
        "        cache.put(f'{sys.argv[2]}-{n}', {'value': n})\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), name], stderr=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    assert [process.communicate(timeout=60)[1] for process in running] == ["", ""]
    with ScoreCache(path) as cache:
        assert all(cache.get(f"{name}-{n}") == {"value": n} for name in "ab" for n in range(40))


def test_a_fork_opens_the_file_for_itself(tmp_path):
    with ScoreCache(tmp_path / "s") as cache:
        cache.put("a", {"value": 1})
        pid = os.fork()
        if pid == 0:
            cache.put("child", {"value": 2})
            cache.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert cache.get("child") == {"value": 2} and cache.get("a") == {"value": 1}


@pytest.mark.parametrize("broken", ["garbage", "folder", "readonly"])
def test_a_file_that_cannot_be_used_costs_one_warning_and_no_error(tmp_path, caplog, broken):
    path = tmp_path / "s"
    if broken == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif broken == "folder":
        path.mkdir()
    else:
        path = Path("/proc/no/such/place/s")
    with caplog.at_level(logging.WARNING), ScoreCache(path) as cache:
        cache.put("a", {"value": 1})
        assert cache.get("a") is None
    assert len(caplog.records) == 1 and str(path) in caplog.text


def test_a_value_that_is_no_json_is_as_good_as_none(tmp_path):
    with ScoreCache(tmp_path / "s") as cache:
        cache.put("a", {"value": 1})
        with sqlite3.connect(tmp_path / "s") as other:
            other.execute("UPDATE scores SET value = '{half'")
        other.close()
        assert cache.get("a") is None
