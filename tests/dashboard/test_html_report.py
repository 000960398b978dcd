"""The report: one file, everything of the user's escaped, nothing loaded from elsewhere; by command and by link."""

import json
from html.parser import HTMLParser

import msgspec
import pytest
from click.testing import CliRunner
from collage_dashboard import report_command
from collage_dashboard.html_report import report
from collage_dashboard.number_downloads import file_stem

from collage_monitor.errors import CollageError, NotFound
from tests.dashboard.generated import DEMO, GeneratedRun

HOSTILE = "</title></script><img src=x onerror=\"alert('1')\">{{ 7 * 191 }}"


class Page(HTMLParser):
    """The text, the tags with their attributes, and the headings of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.headings, self._open = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        if self._open not in {"script", "style"}:
            self.text.append(data.strip())
        if self._open in {"h1", "h2", "h3"} and data.strip():
            self.headings.append(data.strip())

    @property
    def words(self):
        return " ".join(filter(None, self.text))


@pytest.mark.slow
def test_a_runs_report_has_verdict_numbers_charts_layers_and_facts_and_loads_nothing(server, reader):
    html = report(reader, ["run-plain"])
    page = Page(html)
    overview = server.client().overview("run-plain")
    assert overview.headline in page.words
    assert overview.text in page.words
    assert page.headings[0] == "plain"
    headings = {"Numbers", "Curves", "EDQ", "Updates lost", "Update size against the grid", "Updates lost by layer"}
    assert headings <= set(page.headings)
    for words in ("0.913", "config: learning_rate", "invisible here"):
        assert words in page.words
    assert len(html) < 100_000, "it was 4.9 MB, all of it plotly.js"
    assert "script" not in {tag for tag, _ in page.tags}
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert links
    assert all(link.startswith("data:image/png;base64,") for link in links), "the heatmap's cells"
    assert not [attrs for _, attrs in page.tags if "src" in attrs]
    [policy] = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


@pytest.mark.slow
def test_the_report_of_several_compares_strategies(reader):
    page = Page(report(reader, DEMO))
    assert page.headings[:3] == ["Strategies", "Strategies", "Loss against bytes per parameter"]
    for words in ("Use Collage plus · bfloat16", "master-weights", "fp32 reference", "exp_avg_sq is stuck"):
        assert words in page.words
    assert page.words.count("Tokens/s") == 2


@pytest.mark.slow
def test_names_notes_and_config_are_shown_as_they_are(server, reader):
    class Hostile(GeneratedRun):
        def watch(self):
            return msgspec.structs.replace(super().watch(), host=HOSTILE)

    server.runs["run-x"] = Hostile(HOSTILE, "plain", run_id="run-x")
    for runs in (["run-x"], ["run-x", "run-plain"]):
        page = Page(report(reader, runs))
        assert "img" not in {tag for tag, _ in page.tags}
        assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
        assert HOSTILE[:20] in page.words
        assert "{{ 7 * 191 }}" in page.words
        assert "1337" not in page.words


def test_an_unknown_run_and_none_at_all_are_errors(reader):
    with pytest.raises(NotFound):
        report(reader, ["never-existed"])
    with pytest.raises(CollageError, match="collage-monitor list"):
        report(reader, [])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bf16 fine-tune"], "collage-bf16-fine-tune"),
        (["../../etc/passwd"], "collage-etc-passwd"),
        (["ß"], "collage-run"),
        (["a" * 300], f"collage-{'a' * 60}"),
        (["one", "two"], "collage-comparison-of-2-runs"),
    ],
)
def test_a_files_name_is_made_of_letters_digits_and_dashes(names, expected):
    assert file_stem(names) == expected


@pytest.mark.slow
def test_the_pages_offer_their_report_as_a_file(http, server):
    answer = http.get("/report?run=run-plain&run=run-plus")
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"] == 'attachment; filename="collage-comparison-of-2-runs.html"'
    assert answer.mimetype == "text/html"
    assert "Strategies" in Page(answer.get_data(as_text=True)).headings
    gone = http.get("/report?run=never-existed")
    assert (gone.status_code, gone.mimetype) == (404, "text/plain")
    assert http.get("/report").status_code == 404
    server.down = True
    away = http.get("/report?run=run-plain")
    assert away.status_code == 502
    assert "does not answer" in away.get_data(as_text=True)


@pytest.fixture
def command(server, monkeypatch):
    """The verb, reading from the server in memory."""
    monkeypatch.setattr(report_command, "Client", lambda *_, **__: server.client())
    return lambda *arguments: CliRunner().invoke(report_command.report, ["--token", "t", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_writes_the_file_and_says_where(command, tmp_path):
    path = tmp_path / "r.html"
    done = command("run-plain", "--output", path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"file": str(path), "runs": ["plain"], "bytes": path.stat().st_size}
    assert Page(path.read_text(encoding="utf-8")).headings[0] == "plain"
    assert f"written    {path}" in command("run-plain", "--output", path).output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "collage-monitor list"),
        (["run-plain", "--dir", "."], "add --offline"),
        ([f"run-{place}" for place in range(61)], "holds up to 60"),
        (["run-plain", "--output", "/nowhere/at/all.html"], "another --output"),
        (["--offline", "--dir", "."], "no run has left reports"),
        (["run-x", "--offline", "--dir", "."], "run 'run-x' has left no reports"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(command, arguments, words):
    done = command(*arguments)
    assert done.exit_code != 0
    assert words in " ".join(done.output.split())
