"""The command: verbs from entry points, absent components, errors, help, completion."""

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from collage_monitor import command
from collage_monitor.command import VERBS, root
from collage_monitor.command.progress import progress, remark
from collage_monitor.errors import ServerUnreachable
from tools.packages import LISTED

pytestmark = pytest.mark.slow


_ROOT = Path(__file__).parents[2]
_FOLDERS = {"collage-monitor": ".", "collage-optim": "agent", "collage-monitor-server": "server"}
_INSTALLED = {
    "nothing": [],
    "client": ["httpx"],
    "agent": ["httpx", "torch", "python-ulid", "safetensors", "collage-optim"],
    "server": ["httpx", "collage-monitor-server"],
}


def project_of(folder):
    return tomllib.loads((_ROOT / folder / "pyproject.toml").read_text())["project"]


@pytest.fixture
def holds(monkeypatch):
    """An environment with collage-monitor and these distributions, as the three pyproject.toml describe them."""

    def required(distribution):
        told = project_of(_FOLDERS[distribution])
        extras = told.get("optional-dependencies", {}).items()
        return [*told["dependencies"], *(f"{one}; extra == '{extra}'" for extra, own in extras for one in own)]

    def registered(group):
        told = map(project_of, ["."] + ["server"] * ("collage-monitor-server" in present))
        found = [pair for own in told for pair in own["entry-points"].get(group, {}).items()]
        return [EntryPoint(name, value, group) for name, value in found]

    def version_if_installed(name):
        if name.lower() not in present:
            raise PackageNotFoundError(name)
        return "1"

    present = {"collage-monitor"}
    monkeypatch.setattr(command, "requires", required)
    monkeypatch.setattr(command, "entry_points", registered)
    monkeypatch.setattr(command, "version", version_if_installed)
    return present.update


@pytest.mark.parametrize(
    ("installed", "verb", "advice", "missing"),
    [
        ("nothing", "list", "'collage-monitor[client]'", "httpx"),
        ("nothing", "sync", "'collage-monitor[client]'", "httpx"),
        ("client", "audit", "'collage-monitor[agent]'", "collage-optim, python-ulid, safetensors, torch"),
        *(("client", verb, "'collage-monitor[agent]'", "torch") for verb in ("convert", "doctor", "run")),
        ("server", "archive", "'collage-monitor-server[archive]'", "deltalake"),
        ("client", "archive", "'collage-monitor-server[archive]'", "collage-monitor-server"),
        ("client", "archive query", "'collage-monitor[query]'", "duckdb"),
        ("client", "demo", "'collage-monitor[agent]' collage-monitor-server", "torch"),
        ("client", "check -- train.py", "'collage-monitor[agent]' collage-monitor-server", "torch"),
        ("client", "serve mcp", "'collage-monitor[mcp]'", "mcp"),
        *(
            (installed, verb, "collage-monitor-server", "collage-monitor-server")
            for installed in ("client", "agent")
            for verb in ("up", "serve", "serve dashboard", "report", "setup database", "backup", "setup", "token")
        ),
        ("agent", "demo", "collage-monitor-server", "collage-monitor-server"),
    ],
)
def test_a_verb_without_its_components_says_what_to_install(
    holds, monkeypatch, tmp_path, installed, verb, advice, missing
):
    """Nothing is started, no port is guessed at, and nobody is sent to an extra that pulls in torch for nothing."""
    holds(_INSTALLED[installed])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(root, verb.split())
    assert result.exit_code == 1
    assert result.output.rstrip().endswith(f"pip install {advice}")
    assert f"{verb.replace('train.py', 'PROGRAM')} needs " in result.output
    assert missing in result.output
    assert not re.search(r"\bport\b", result.output)
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_verbs_says_in_full_what_to_install(holds):
    """In a terminal of 80 columns, too: the names of ten packages, cut off, help nobody."""
    listed = CliRunner().invoke(root, ["--help"], env={"COLUMNS": "80"}).output
    assert "  up *     server and dashboard, here    status * " in listed, "marked as not working"
    head, _, needed = listed.partition("need packages:\n")
    assert head.count(" * ") > 20
    assert "  pip install collage-monitor-server  (" in needed
    assert all(line.endswith(")") or not line for line in needed.splitlines()[:-2])


def test_the_verbs_of_the_server_are_those_that_it_registers(holds):
    """So that each is listed, with what installs it, where the server is not installed."""
    assert set(project_of("server")["entry-points"][VERBS]) == set(command._OF_SERVER)
    without = root.list_commands(click.Context(root))
    holds(_INSTALLED["server"])
    assert root.list_commands(click.Context(root)) == without


def in_a_process(code, *words, options=(), **environment):
    """What Python does with this code, `sys` imported and its arguments these."""
    given = f"import sys; sys.argv[1:] = {words!r}\n{code}"
    return subprocess.run(
        [sys.executable, *options, "-c", given], env=os.environ | environment, capture_output=True, text=True
    )


MAIN = "from collage_monitor.command import main; sys.argv[0] = 'collage-monitor'; main()"


def test_what_waits_on_disk_is_sent_without_torch(holds, tmp_path):
    """`sync` runs where a disk is shared, on a machine that trains nothing."""
    holds(_INSTALLED["client"])
    arguments = ["sync", "--dir", str(tmp_path), "--server-url", "http://127.0.0.1:9"]
    code = f"sys.modules['torch'] = None\nfrom collage_agent.command.sync import sync\nsync({arguments[1:]!r})"
    done = in_a_process(code)
    assert "nothing waits in" in done.stdout, done.stderr
    assert "nothing waits in" in CliRunner().invoke(root, arguments).output


def test_the_command_alone_shows_its_help_once():
    result = CliRunner().invoke(root, [])
    assert result.exit_code == 2
    assert result.stderr == CliRunner().invoke(root, ["--help"]).output
    assert "collage-monitor: " not in result.stderr


@pytest.mark.parametrize(
    ("verb", "blocked", "advice"),
    [
        ("list", "httpx", "'collage-monitor[client]'"),
        ("serve", "fastapi", "collage-monitor-server"),
        ("serve dashboard", "dash", "collage-monitor-server"),
    ],
)
def test_a_verb_whose_library_is_absent_names_the_smallest_extra(verb, blocked, advice):
    done = in_a_process(f"sys.modules[{blocked!r}] = None\n{MAIN}", *verb.split())
    assert done.returncode == 1
    assert f"needs {blocked}" in done.stderr
    assert done.stderr.rstrip().endswith(f"pip install {advice}")


def refused_by(work, monkeypatch, *words):
    """What becomes of a verb that does this work."""
    verb = click.command("refuse")(work)
    entry = SimpleNamespace(name="refuse", value="somewhere.else:refuse", load=lambda: verb)
    monkeypatch.setattr(command, "_found", lambda: {"refuse": entry})
    return CliRunner().invoke(root, [*words, "refuse"])


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (ServerUnreachable("no answer from http://x"), 1, "no answer from http://x"),
        (click.ClickException("no answer from http://x"), 1, "no answer from http://x"),
        (click.UsageError("no answer from http://x"), 2, "no answer from http://x"),
        (KeyboardInterrupt(), 1, "stopped"),
    ],
)
def test_every_error_is_a_sentence_behind_one_prefix(monkeypatch, raised, status, said):
    def refuse():
        raise raised

    result = refused_by(refuse, monkeypatch)
    assert result.exit_code == status
    assert result.stderr.splitlines()[-1] == f"collage-monitor: {said}"
    assert "Traceback" not in result.output
    assert "Error:" not in result.output


@pytest.mark.parametrize(
    ("typed", "meant"), [("lst", "list"), ("statsu", "status"), ("replya", None), ("backup mkae", "make")]
)
def test_a_verb_that_is_mistyped_is_answered_with_the_one_that_was_meant(typed, meant):
    result = CliRunner().invoke(root, typed.split())
    assert result.exit_code == 2
    said = result.stderr.splitlines()[-1]
    assert said.startswith(f"collage-monitor: no verb is called {typed.split()[-1]!r}; ")
    assert f"did you mean {meant!r}" in said if meant else True


@pytest.mark.parametrize("words", [["-h"], ["show", "-h"], ["token", "create", "-h"]])
def test_h_is_help_everywhere(words):
    result = CliRunner().invoke(root, words)
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [("collage-monitor st", 1, "status"), ("collage-monitor list --pro", 2, "--project")],
)
def test_a_shell_is_given_the_verbs_and_options_to_complete(words, place, offered):
    asked = {"_COLLAGE_MONITOR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    assert offered in [line.partition(",")[2] for line in in_a_process(MAIN, **asked).stdout.splitlines()]


def test_the_list_of_verbs_has_each_of_ours_once_and_imports_none():
    """Neither torch, which takes seconds to load."""
    told = in_a_process(MAIN, "-h", options=("-X", "importtime"))
    listed = [verb for verb, _ in LISTED.findall(told.stdout)]
    assert sorted(listed) == sorted({entry.name.partition(".")[0] for entry in entry_points(group=VERBS)})
    assert "Of other packages" not in told.stdout
    assert not re.search(r"\b(httpx|torch|fastapi|collage_server|collage_monitor\.wire)\b", told.stderr)


def test_the_first_help_is_one_screen_of_few_verbs():
    told = CliRunner().invoke(root, ["-h"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(told) <= 24
    assert max(map(len, told)) <= 80
    assert len(root.list_commands(click.Context(root))) <= 26
    narrow = CliRunner().invoke(root, ["-h"], terminal_width=60).stdout.splitlines()
    assert max(map(len, narrow)) <= 60


def test_a_verb_below_another_imports_nothing_of_it():
    """`serve mcp` starts without the server's packages, which `serve` needs, and faster."""
    code = "from collage_monitor.command import root; root(['serve', 'mcp', '-h'], standalone_mode=False)"
    done = in_a_process(code, options=("-X", "importtime"))
    assert "Model Context Protocol" in done.stdout
    assert "collage_server" not in done.stderr


@pytest.mark.parametrize(("flags", "words"), [((), "copy all|all is well"), (("--quiet",), ""), (("-q",), "")])
def test_quiet_leaves_out_progress_and_remarks_but_no_error(monkeypatch, flags, words):
    def work():
        with progress("copy all"):
            remark("all is well")
        raise ServerUnreachable("no answer from http://x")

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # By these rich takes standard error for a terminal.
        monkeypatch.setenv(name, "1")
    told = refused_by(work, monkeypatch, *flags).stderr
    assert all(word in told for word in words.split("|"))
    assert words or told == "collage-monitor: no answer from http://x\n"


def _verbs(group, words=()):
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        yield (*words, name), found
        if isinstance(found, click.Group):
            yield from _verbs(found, (*words, name))


def test_options_of_one_meaning_have_one_name(monkeypatch):
    """A file that is written is `--output`, a server that is not asked is `--offline`, a tag is `--tag`."""
    monkeypatch.setattr(command, "_found", cache(command._found))
    seen: dict[str, set[bool]] = {}
    for entry in (entry for _, verb in _verbs(root) for entry in verb.params if isinstance(entry, click.Option)):
        for option in entry.opts:
            seen.setdefault(option, set()).add(bool(entry.is_flag))
    assert [option for option, kinds in seen.items() if len(kinds) > 1] == []
    assert not {"--file", "--tags", "--remove", "--on-host"} & seen.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check", "give one RUN, or a program behind --"),
        ("check r -- python train.py", "give one RUN, or a program behind --"),
        ("check --", "give one RUN, or a program behind --"),
        ("check r --steps 20", "--steps says nothing about a RUN: leave it out"),
        ("check --offline -- python train.py", "--offline says nothing about a PROGRAM: leave it out"),
        ("check r --dir .", "--dir says where the run left its reports: add --offline"),
        ("check r --fail-if forecast-lost>0.5", "--fail-if forecast-lost>0.5 needs --schedule"),
        ("edit r --step 3", "--step says what a note is about: add --note TEXT"),
        ("edit r --note", "'--note' requires an argument"),
        ("edit r --remove x", "--remove"),
        ("token create --name n --role admin --output f", "give --offline, too"),
        ("token list --host", "--host"),
        ("setup database --database sqlite:///x", "`serve` migrates SQLite by itself"),
        ("archive query x --json --csv", "--json and --csv are two formats; give one of them"),
        ("run --tag", "'--tag' requires an argument"),
        ("serve --port 1 dashboard", "options before dashboard are the server's"),
    ],
)
def test_a_wrong_call_of_a_verb_is_answered_with_what_to_do(words, said):
    result = CliRunner().invoke(root, words.split())
    assert result.exit_code in {1, 2}
    assert said in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def _wrong_calls():
    """Each verb with each of its options misspelt, with no value of its kind, and without what it asks for."""
    free = (click.types.StringParamType, click.Path, click.File, click.types.UnprocessedParamType)
    for words, verb in _verbs(root):
        for entry in verb.params if not isinstance(verb, click.Group) or verb.invoke_without_command else ():
            name = entry.opts[-1]
            if isinstance(entry, click.Argument):
                if entry.required:
                    yield words, str(entry.make_metavar(click.Context(verb)))
            elif name != "--help":
                yield (*words, f"{name}x", "1"), f"{name}x"
                if not entry.is_flag and not isinstance(entry.type, free):
                    yield (*words, name, "no~such"), "no~such"


def test_each_wrong_call_of_each_verb_names_what_is_wrong(monkeypatch):
    # What is installed is looked up once, not for each word of each call.
    monkeypatch.setattr(command, "_found", cache(command._found))
    calls, silent = list(_wrong_calls()), []
    for words, named in calls:
        result = CliRunner().invoke(root, words)
        last = result.stderr.splitlines()[-1]
        option = next((word.removesuffix("x") for word in words if word.startswith("--")), "")
        if result.exit_code != 2 or result.stdout or named not in last or option not in last:
            silent.append((words, result.output))
    assert not silent
    assert len(calls) > 200
