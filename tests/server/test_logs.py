"""Logs: one line a record, a request id in each, and no secret in any."""

import io
import json
import logging
import socket
import warnings

import pytest
from collage_server.logs import REQUEST_ID, configure

from tests.server.test_process import serving
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SECRET = "collage_" + "s" * 43


@pytest.fixture
def written():
    """configure(form) on a buffer, undone afterwards."""
    root, shown = logging.getLogger(), warnings.showwarning
    before, level = root.handlers[:], root.level
    buffer = io.StringIO()

    def begin(form, secrets=()):
        configure(form, "debug", secrets, buffer)
        return buffer

    yield begin
    logging.captureWarnings(False)
    warnings.showwarning = shown
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.parametrize("secret", ["own-secret", SECRET, 'quoted"token', "back\\slash", "not-ascii-é"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_secret_is_masked_wherever_it_comes_from_and_whatever_its_characters_become(written, form, secret):
    buffer = written(form, [] if secret == SECRET else [secret])
    try:
        raise ValueError(f"about {secret}")
    except ValueError:
        said = "Authorization: Bearer abc.def, with %s"
        logging.getLogger("x").exception(said, secret, extra={"actor": secret})
    text = buffer.getvalue()
    for hidden in (secret, json.dumps(secret)[1:-1], "abc.def"):
        assert hidden not in text
    assert "ValueError" in text
    assert "***" in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_neither_a_message_nor_an_exception_can_forge_a_line(written, form):
    buffer, logger = written(form), logging.getLogger("x")
    logger.warning("one\n2026-11-21T00:00:00.000Z INFO x forged\r\x1b[31m")
    assert len(buffer.getvalue().splitlines()) == 1
    assert "\x1b" not in buffer.getvalue()
    try:
        raise ValueError("one\n2026-11-21T00:00:00.000Z INFO x forged\rtwo")
    except ValueError:
        logger.exception("failed")
    _, first, *others = buffer.getvalue().splitlines()
    assert "forged" in [first, *others][-1]
    assert all(line.startswith("  ") for line in others)
    assert first.endswith("ERROR x failed") if form == "text" else others == []


def test_of_many_refusals_some_are_written_and_all_are_counted(written):
    """One client without a token made 2,120 lines a second."""
    buffer = written("text")
    logger = logging.getLogger("collage_server.requests")
    for number in range(5000):
        about = {"name": logger.name, "levelno": logging.INFO, "levelname": "INFO", "msg": "refused"}
        logger.handle(logging.makeLogRecord(about | {"created": 1.7e9 + number / 2000}))
        if number == 100:
            logger.warning("a failure is written whatever is refused")
    found = buffer.getvalue().splitlines()
    assert len(found) == 3 * 20 + 1
    told = [line.rpartition("(")[2] for line in found if "left out" in line]
    assert told == ["1980 refusals before it are left out)"] * 2


def test_json_lines_carry_the_request(written):
    buffer = written("json")
    token = REQUEST_ID.set("req-1")
    try:
        logging.getLogger("x").info("%(method)s", {"method": "GET"}, extra={"method": "GET", "status": 404})
    finally:
        REQUEST_ID.reset(token)
    entry = json.loads(buffer.getvalue())
    assert (entry["message"], entry["request_id"], entry["status"], entry["level"]) == ("GET", "req-1", 404, "info")
    assert entry["time"].endswith("Z")


def test_a_warning_keeps_to_the_form_of_the_log(written):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        buffer = written("json")
        warnings.warn("invalid value encountered in divide", RuntimeWarning, stacklevel=1)
    entry = json.loads(buffer.getvalue())
    assert (entry["level"], "invalid value" in entry["message"]) == ("warning", True)


def test_a_servers_log_names_refused_requests_and_holds_no_token(tmp_path):
    """Who asks for a web socket or goes away is no failure."""
    log = tmp_path / "log"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    flags = ("--log-format", "json", "--log-level", "debug")
    with log.open("wb") as stderr, serving(tmp_path / "data", *flags, stderr=stderr) as (process, client, _):
        own = (tmp_path / "data" / "token").read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {own}", "X-Request-Id": "find-me"}
        asked = {**headers, **upgrade, "Sec-WebSocket-Key": 16 * "a"}
        assert client.get("/api/v1/runs", headers=asked).status_code == 200
        with socket.create_connection((client.base_url.host, client.base_url.port)) as gone:
            lines = ("POST /api/v1/projects/p/runs HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {own}")
            gone.sendall("\r\n".join([*lines, "Content-Length: 9", "", "{"]).encode())
        body = {"name": "n", "role": "read", "projects": ["p"]}
        made = client.post("/api/v1/tokens", json=body, headers=headers).json()["secret"]
        client.get("/api/v1/runs/none", headers=headers)
        client.get("/api/v1/runs/a%0Ab", headers={"Authorization": f"Bearer {made}"})
        client.get("/api/v1/runs", params={"q": made}, headers={"Authorization": "Bearer wrong-one"})
        process.terminate()
        process.wait(PATIENCE_SECONDS)
    text = log.read_text()
    for secret in (own, made, "wrong-one"):
        assert secret not in text
    assert "find-me" in text
    assert "a%0Ab" in text
    assert "Traceback" not in text
    entries = [json.loads(line) for line in text.splitlines()]
    assert 500 not in {entry.get("status") for entry in entries}
    refused = [entry for entry in entries if entry.get("status") == 404]
    assert (refused[0]["request_id"], refused[0]["actor"]) == ("find-me", "server-token")


def test_plain_http_beyond_this_machine_is_warned_of(tmp_path):
    log = tmp_path / "log"
    flags = ("--host", "0.0.0.0", "--allowed-host", "box.lan")
    with log.open("wb") as stderr, serving(tmp_path / "data", *flags, stderr=stderr):
        assert "plain HTTP on 0.0.0.0" in log.read_text()
