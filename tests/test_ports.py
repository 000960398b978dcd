"""Two sessions of tests on one machine share its ports."""

from tests import ports


def test_a_port_that_one_session_was_given_no_other_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_PORTS", range(20_000, 20_016))
    one, other = (ports._free_ports.__wrapped__() for _ in range(2))
    given = [next(session, None) for _ in range(8) for session in (one, other)]
    given = [port for port in given if port is not None]
    assert len(given) > 8
    assert len(set(given)) == len(given)
