"""What a run says of itself at its end: the verdict once, how to look at it, and no link where nothing was sent."""

import os

from collage_agent.transport import MemoryTransport

from collage_monitor.local import LocalServer, announced
from tests.agent_delivery.doubles import HandleDouble, ServerDouble, make_run


def test_no_link_where_nothing_was_sent(tmp_path, server, capsys):
    run = make_run(tmp_path, name="empty", server_url=server.url)
    run.finish()
    assert capsys.readouterr().out == "collage: run empty: nothing was sent\n"
    assert "href" not in run._repr_html_()


def test_finish_prints_the_verdict_once_and_how_to_look_at_the_run(tmp_path, server, capsys):
    """No page is known to answer beside a server alone: a link would open its API, which asks for a token."""
    run = make_run(tmp_path, name="baseline", server_url=server.url)
    run.attach(HandleDouble(3))
    run.log({"loss": 1.0})
    run.finish()
    printed = capsys.readouterr().out
    assert printed.count("the verdict") == 1
    assert f"run baseline ({run.run_id}) is at {server.url}; " in printed
    assert f"collage-monitor serve dashboard --server-url {server.url}" in printed
    assert "/run" not in printed
    run.finish()
    assert capsys.readouterr().out == ""


def test_finish_prints_the_page_where_a_dashboard_answers(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dashboard = ServerDouble()
    try:
        with announced(LocalServer(server.url, dashboard.url, str(tmp_path), os.getpid())):
            run = make_run(tmp_path, name="baseline", server_url=server.url)
            run.log({"loss": 1.0})
            run.finish()
            assert run.address == f"{dashboard.url}/run/{run.run_id}"
            assert f'<iframe src="{run.address}?embed=curves"' in run._repr_html_()
        assert f"run baseline: {dashboard.url}/run/{run.run_id}\n" in capsys.readouterr().out
    finally:
        dashboard.close()


def test_a_run_shows_itself_in_a_notebook(tmp_path):
    run = make_run(tmp_path, MemoryTransport(), name="<b>", server_url="http://example.org:1/")
    run.log({"loss": 1.0})
    run.finish()
    shown = run._repr_html_()
    assert "&lt;b&gt;" in shown
    assert f'href="http://example.org:1/api/v1/runs/{run.run_id}"' in shown
    assert "iframe" not in shown
