"""The data folder and its token."""

import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from collage_monitor.local import data_folder, ensure_token, read_token, token_path


def test_the_folder_comes_from_argument_environment_and_home(tmp_path):
    assert data_folder(tmp_path, {"COLLAGE_DIR": "/x"}) == tmp_path
    assert str(data_folder(None, {"COLLAGE_DIR": "/x"})) == "/x"
    assert str(data_folder(None, {"XDG_DATA_HOME": "/y"})) == "/y/collage-monitor"
    assert data_folder(None, {}).parts[-2:] == ("share", "collage-monitor")


def test_a_token_is_made_once_and_private(tmp_path):
    folder = tmp_path / "new"
    assert read_token(folder) is None
    token = ensure_token(folder)
    assert len(token) >= 43
    assert ensure_token(folder) == read_token(folder) == token
    assert stat.S_IMODE(token_path(folder).stat().st_mode) == 0o600


def test_several_that_start_together_share_one_token(tmp_path):
    for attempt in range(20):
        folder, together = tmp_path / str(attempt), Barrier(4)

        def start(_, folder=folder, together=together):
            together.wait()
            return ensure_token(folder)

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(start, range(4)))) == 1
        assert [path.name for path in folder.iterdir()] == ["token"]


@pytest.mark.parametrize("content", [b"", "tök".encode()])
def test_a_file_without_a_token_is_named(tmp_path, content):
    token_path(tmp_path).write_bytes(content)
    assert read_token(tmp_path) is None
    with pytest.raises(PermissionError, match="remove it to make a new token"):
        ensure_token(tmp_path)
