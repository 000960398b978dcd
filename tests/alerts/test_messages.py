"""Messages about incidents: to a webhook, Slack and by e-mail, until they are taken, never where they must not."""

import logging

import httpx
import msgspec
import pytest
from collage_server.alerts import Messenger, targets_of
from collage_server.alerts.targets import EmailTarget, SlackTarget, WebhookTarget, try_targets
from collage_server.errors import UnsafeAddress
from collage_server.settings import Settings, SettingsError

from collage_monitor import wire
from tests.alerts.receivers import mail_server, web_server
from tests.server.conftest import NOW
from tests.server.store.incidents import LABELS, LOW

INCIDENT = wire.Incident(
    incident_id="1",
    alert="CollageEdqLow",
    severity="warning",
    source="server",
    state="firing",
    text="EDQ is <low> & falls.",
    started_at=NOW,
    run_id="r1",
    project="p",
    labels={"run": "a run"},
    step=70,
)


def settings_with(tmp_path, **more):
    return Settings(folder=tmp_path, no_auth=True, **more)


def test_the_settings_say_who_is_told(tmp_path):
    assert targets_of(settings_with(tmp_path)) == []
    told = {"alert_webhook": "https://example.org/hook", "alert_slack": "https://example.org/slack"}
    told |= {"alert_smtp": "smtp://mail.example.org", "alert_email": "a@example.org, b@example.org"}
    assert [target.name for target in targets_of(settings_with(tmp_path, **told))] == ["webhook", "slack", "email"]
    for setting, value in (
        ("alert_webhook", "file:///etc/passwd"),
        ("alert_webhook", "http://user:word@example.org/"),
        ("alert_smtp", "mail.example.org"),
        ("alert_email", "nobody"),
        ("alerts", "all"),
    ):
        with pytest.raises(SettingsError, match=f"COLLAGE_SERVER_{setting.upper()}"):
            settings_with(tmp_path, **{setting: value})
    shown = settings_with(tmp_path, alert_slack="https://example.org/secret").masked()
    assert shown["alert_slack"] == "***"


def test_a_webhook_gets_the_incident_and_what_to_do():
    with web_server() as (address, requests):
        WebhookTarget(f"{address}/hook?a=1").send(INCIDENT)
    ((path, host, body),) = requests
    assert (path, host) == ("/hook?a=1", address.removeprefix("http://"))
    assert body["version"] == 1
    assert body["incident"]["alert"] == "CollageEdqLow"
    assert body["runbook"] == "docs/alerts.md#collageedqlow"
    assert body["first_step"].startswith("Look at")


def test_a_message_names_no_step_where_none_is_known():
    unknown = msgspec.structs.replace(INCIDENT, step=None)
    assert "project p, run r1, step 70" in SlackTarget("").body(INCIDENT)["text"]
    assert "project p, run r1\n" in SlackTarget("").body(unknown)["text"]


def test_each_message_leads_to_the_incidents_page_and_slack_gets_a_text_without_marks_of_its_own(tmp_path):
    told = {"dashboard_url": "https://box.lan/monitor/"}
    with web_server() as (address, requests):
        for target in targets_of(settings_with(tmp_path, alert_webhook=address, alert_slack=address, **told)):
            target.send(INCIDENT)
    assert requests[0][2]["page"] == "https://box.lan/monitor/incident/1"
    text = requests[1][2]["text"]
    assert "\nhttps://box.lan/monitor/incident/1\n" in text
    assert text.startswith("CollageEdqLow fires (warning): run a run")
    assert "EDQ is &lt;low&gt; &amp; falls." in text


def test_an_e_mail_goes_to_everybody():
    with mail_server() as (address, mails):
        EmailTarget(f"smtp://{address}", "a@example.org", ["a@example.org", "b@example.org"]).send(INCIDENT)
    (mail,) = mails
    assert "To: a@example.org, b@example.org" in mail
    assert "Subject: CollageEdqLow fires (warning): run a run" in mail
    assert "First: Look at" in mail


def test_a_redirect_is_a_failure_and_not_followed():
    with web_server() as (elsewhere, asked), web_server([(302, {"Location": elsewhere})]) as (address, _):
        with pytest.raises(httpx.HTTPStatusError):
            WebhookTarget(address).send(INCIDENT)
        assert asked == []


HOSTS = """
169.254.169.254 [fe80::1] [::ffff:169.254.169.254] [64:ff9b::169.254.169.254] [64:ff9b:1::a9fe:a9fe]
[2002:a9fe:a9fe::1] 0.0.0.0 224.0.0.1 2852039166 [fd00:ec2::254]
100.100.100.200 [::ffff:100.100.100.200] 168.63.129.16
"""


@pytest.mark.parametrize("host", HOSTS.split())
def test_no_message_goes_to_a_clouds_metadata_or_a_link_local_address(host):
    with pytest.raises((UnsafeAddress, httpx.InvalidURL)):
        WebhookTarget(f"http://{host}/latest/meta-data").send(INCIDENT)


class Sometimes:
    """A target that fails so many times."""

    def __init__(self, failures, name="webhook"):
        self.failures, self.name, self.got = failures, name, []

    def send(self, incident):
        if self.failures:
            self.failures -= 1
            raise httpx.ConnectError("http://secret.example.org does not answer")
        self.got.append((incident.alert, incident.state))


@pytest.fixture
def store(server):
    server.filled()
    return server.app.state.collage.store


def messenger(store, clock, *targets):
    return Messenger(store, targets, clock=clock, interval_seconds=1.0)


@pytest.mark.slow
def test_it_tries_again_until_the_message_is_taken(store, clock, caplog):
    flaky, sound = Sometimes(2), Sometimes(0, "slack")
    work = messenger(store, clock, flaky, sound)
    store.incidents.fire(LOW, clock())
    caplog.set_level(logging.WARNING)
    for _ in range(4):
        work.do_due_work()
    assert (flaky.failures, sound.got) == (1, [("CollageEdqLow", "firing")]), "it waits before it tries again"
    for _ in range(4):
        clock.now += 10
        work.do_due_work()
    assert flaky.got == sound.got == [("CollageEdqLow", "firing")]
    assert "secret" not in caplog.text
    store.incidents.resolve("CollageEdqLow", LABELS, "server", clock())
    work.do_due_work()
    work.do_due_work()
    assert flaky.got == sound.got == [("CollageEdqLow", "firing"), ("CollageEdqLow", "resolved")]


def test_another_process_goes_on_where_one_stopped(store, clock):
    store.incidents.fire(LOW, clock())
    first, second = Sometimes(0), Sometimes(0)
    begun = messenger(store, clock, first)
    begun.do_due_work()
    messenger(store, clock, second).do_due_work()
    begun.stop(1.0)
    messenger(store, clock, second, Sometimes(0, "slack")).do_due_work()
    assert (first.got, second.got) == ([("CollageEdqLow", "firing")], [])


def test_an_end_is_told_only_to_who_knows_that_it_fired(store, clock):
    target = Sometimes(0)
    store.incidents.fire(LOW, clock())
    store.incidents.resolve("CollageEdqLow", LABELS, "server", clock())
    messenger(store, clock, target).do_due_work()
    assert target.got == []
    assert list(store.incidents.unsettled(clock())) == []


def test_a_silenced_incident_is_told_when_the_silence_is_over(store, clock, server):
    server.post("/silences", wire.SilenceCreate(seconds=60.0, alert="CollageEdqLow"), wire.Silence, status=201)
    target = Sometimes(0)
    work = messenger(store, clock, target)
    store.incidents.fire(LOW, clock())
    work.do_due_work()
    assert target.got == [("CollageSilenced", "firing")]
    clock.now += 61
    work.do_due_work()
    assert target.got[1:] == [("CollageEdqLow", "firing")]
    server.app.state.collage.maintenance.once()
    work.do_due_work()
    assert target.got[2:] == [("CollageSilenced", "resolved")]


def test_who_is_told_of_a_silence_reads_what_it_covers_and_until_when(store, clock, server):
    create = wire.SilenceCreate(seconds=60.0, project="p", comment="a rehearsal")
    server.post("/silences", create, wire.Silence, status=201)
    with web_server() as (address, requests):
        messenger(store, clock, WebhookTarget(address), SlackTarget(address)).do_due_work()
    (_, _, told), (_, _, text) = requests
    said = "No messages until 2023-11-14 22:14:20 UTC about project p. By loopback: a rehearsal"
    assert told["incident"]["text"] == said
    assert said in text["text"]
    assert (told["incident"]["severity"], told["incident"]["run_id"]) == ("info", None)


def test_after_a_day_a_message_is_given_up(store, clock):
    target = Sometimes(10**6)
    work = messenger(store, clock, target)
    store.incidents.fire(LOW, clock())
    work.do_due_work()
    assert list(store.incidents.unsettled(clock())) != []
    clock.now += 90_000
    work.do_due_work()
    assert list(store.incidents.unsettled(clock())) == []


def test_each_target_is_tried_once_and_what_went_wrong_hides_its_address():
    with web_server() as (address, requests):
        good, bad = WebhookTarget(f"{address}/hook"), SlackTarget("http://169.254.169.254/latest/secret")
        tried = try_targets([good, bad], NOW)
    assert [(entry.target, entry.problem) for entry in tried] == [("webhook", None), ("slack", "UnsafeAddress")]
    ((_, _, body),) = requests
    assert body["incident"]["alert"] == "CollageTest"
    assert body["incident"]["text"].startswith("This is a test, nothing is wrong")
