"""docs/how-to/export-and-import.md: ten recipes that run one after the other, as somebody would who pastes them."""

import re

import pytest

from collage_monitor import wire
from collage_monitor.client import Client
from tests.docs.blocks import DOCS, blocks
from tests.end_to_end.servers import KillableServer
from tests.server.samples import report, stream_create

pytestmark = pytest.mark.slow


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A server with four runs of a sweep; this process finds it by the environment, as a reader's would."""
    server = KillableServer(tmp_path / "data", tmp_path / "server.log")
    server.start()
    monkeypatch.setenv("COLLAGE_SERVER_URL", server.url)
    monkeypatch.setenv("COLLAGE_TOKEN", (tmp_path / "data" / "token").read_text().strip())
    monkeypatch.chdir(tmp_path)
    with Client() as client:
        for number in range(4):
            run_id = f"RUN{number or ''}"
            create = wire.RunCreate(
                run_id=run_id, name=f"seed {number}", seed=number, config={"learning_rate": 1e-4}
            )
            client.create_run("sweep", create)
            client.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=1))
            stream = client.create_stream(run_id, stream_create(f"s{number}", launch_id="l"))
            reports = [report(seq, 10 * (seq + 1)) for seq in range(40)]
            client.send_reports(stream.stream_id, wire.ReportBatch(reports=reports))
            client.overview(run_id)
    yield tmp_path
    server.kill()


def test_every_recipe_runs_and_shows_what_it_promises(filled, capsys):
    page = (DOCS / "how-to/export-and-import.md").read_text()
    assert len(re.findall(r"^### \d+\. ", page, re.MULTILINE)) == 10
    namespace: dict = {}
    said = []
    try:
        for code in blocks("how-to/export-and-import.md"):
            exec(compile(code, "export-and-import.md", "exec"), namespace)
            said.append(capsys.readouterr().out)
        assert len(said) == 11
        assert "seed 3" in said[1]
        assert "0.0001" in said[2]
        assert re.search(r"plain\s+\S+\s+\S+\s+4", said[3]), "one strategy, four seeds"
        assert "400" in said[4]
        assert "embedding.weight" in said[6]
        assert "RUN3" in said[7]
        assert (filled / "sweep.parquet").stat().st_size > 1000
        assert namespace["found"].headline in said[9]
        tags = {tuple(run.tags) for run in namespace["client"].runs().runs}
        told = {row["health"] for row in namespace["client"].runs_frame().to_pylist()}
        expected = () if told <= {"healthy", "unknown"} else ("look at this",)
        assert tags == {expected}
    finally:
        namespace["client"].close()
