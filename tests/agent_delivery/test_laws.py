"""Delivery as a law: whatever fails, each report arrives once and in order, or is counted and numbered as given up.

Queue, stream, log and sender are the real ones; training, server, disk and clock are the test's. A
process dies at any turn, within a message and within a write.
"""

import tempfile
from pathlib import Path

import pytest
from collage_agent.transport import report_log
from collage_agent.transport.sender import send_folder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.agent_delivery.stepped import TROUBLES, Clock, Disk, Process, UnreliableServer, patch_surroundings

SLOTS = st.sampled_from([0, 0, 1])
ANY_TROUBLE = st.sampled_from(TROUBLES)
TROUBLE = st.lists(ANY_TROUBLE, min_size=1, max_size=4)
SERVER_REASONS = {"rejected", *(f"refused_{status}" for status in (400, 404, 409, 422))}
MOST_REPORTS = st.sampled_from([None, 1, 2])
MEASURED = st.sampled_from(["none", "some", "all"])


class DeliveryMachine(RuleBasedStateMachine):
    """Two processes of one run at most live at a time, on one folder; others have ended before."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.clock, self.disk = Clock(), Disk()
        self.server = UnreliableServer(self.clock)
        patch_surroundings(self.patch, self.clock, self.disk, self.server)
        self.living: dict[int, Process] = {}
        self.ended: list[Ended] = []
        self.names = 0
        self.is_alone = True
        """Whether no two processes have lived at a time: the later could not wait for what the earlier left."""

    @initialize(offline=st.booleans(), started=st.booleans(), places=st.integers(1, 2), gentle=st.booleans())
    def first(self, offline, started, places, gentle):
        """In some examples one process lives at a time; in some no registration is lost, so the order is known."""
        self.places = places
        self.never = {"forget", "full", *(name for name in TROUBLES if "refuse" in name)} if gentle else set()
        self.process(0, offline=offline, started=started)

    @rule(slot=SLOTS, steps=st.integers(1, 20), measured=MEASURED, pace=st.sampled_from([1, 3, 30]))
    def train(self, slot, steps, measured, pace):
        """Some steps, each with a loss or a measurement or both; the worker takes a turn every `pace` of them."""
        for number in range(steps):
            process = self.process(slot)
            process.step += 1
            if measured == "all" or (measured == "some" and number % 3 == 0):
                process.measure(self.name(), process.step)
            if measured != "all" or number % 2:
                process.log(self.name(), process.step)
            if number % pace == pace - 1:
                self.work(slot, 1)

    @rule(slot=SLOTS, troubles=TROUBLE, steps=st.integers(1, 12), pace=st.sampled_from([1, 3]), most=MOST_REPORTS)
    def train_in_trouble(self, slot, troubles, steps, pace, most):
        self.trouble(troubles)
        self.server.most_reports = most
        self.train(slot, steps, "some", pace)

    @rule(slot=SLOTS, measured=st.booleans())
    def say_more(self, slot, measured):
        """More of the same step: of another watched model, or logged later."""
        process = self.process(slot)
        told = process.measure if measured else process.log
        told(self.name(), process.step)

    @rule(slot=SLOTS, steps=st.integers(1, 5))
    def go_back(self, slot, steps):
        """Training goes on from a checkpoint: a new attempt with a stream of its own."""
        process = self.process(slot)
        if process.started:
            process.step = max(0, process.step - steps)
            process.begin(process.step + 1)

    @rule(slot=SLOTS, turns=st.integers(1, 6), troubles=TROUBLE, most=MOST_REPORTS)
    def work_in_trouble(self, slot, turns, troubles, most):
        """Turns of the worker after a pause, without steps."""
        self.clock.sleep(100.0)
        self.server.most_reports = most
        self.trouble(troubles)
        self.work(slot, turns)

    def work(self, slot, turns):
        for _ in range(turns):
            self.clock.sleep(1.0)
            if slot in self.living:
                self.living[slot].work()
                self.bury()

    @rule()
    def recover(self):
        self.server.troubles.clear()
        self.server.most_reports = None
        self.disk.troubles = []
        self.clock.sleep(1_000.0)

    @rule(writes=st.lists(st.sampled_from(["none", "none", "full", "full", "dies"]), min_size=1, max_size=8))
    def break_disk(self, writes):
        self.disk.troubles = [trouble for trouble in writes if trouble not in self.never]
        self.server.may_lack_registrations |= "full" in self.disk.troubles

    @rule(slot=SLOTS, how=st.sampled_from(["kill", "finished", "failed"]), troubles=TROUBLE | st.just([]))
    def end(self, slot, how, troubles):
        """A process is killed or finishes; the next one in its place begins over what it has left."""
        if (process := self.living.get(slot)) is not None:
            self.trouble(troubles)
            with self.server.hurried():
                process.kill() if how == "kill" else process.finish(how)
                self.bury(slot)

    @rule(seconds=st.sampled_from([0.0, 20.0]))
    def replay(self, seconds):
        """The command that sends what nobody holds; it may die like any other process, whose files are let go."""
        opened = []

        def abandoned(folder, own):
            for found in report_log.abandoned_spools(folder, own):
                opened.append(found)
                yield found

        with self.patch.context() as patch, self.server.hurried():
            patch.setattr("collage_agent.transport.sender.abandoned_spools", abandoned)
            try:
                send_folder(self.path, self.server, seconds, sleep=self.clock.sleep, clock=self.clock.monotonic)
            except SystemExit:
                for found in opened:
                    found.forget()

    @invariant()
    def living_processes_know_what_became_of_their_reports(self):
        assert not self.server.broken, self.server.broken
        for process in self.living.values():
            run = process.run
            assert min(run.reports_pending, run.reports_spooled, run.reports_sent, process.dropped) >= 0
            known = run.reports_pending + run.reports_spooled + run.reports_sent + process.dropped
            assert run.reports_made == known
            assert 0 <= known - process.entries <= process.surplus
            assert run.reports_sent == sum(len(self.server.acknowledged[stream]) for stream in process.streams)

    def teardown(self):
        try:
            self.end_well()
        finally:
            for process in self.living.values():
                process.kill()
            self.folder.cleanup()
            self.patch.undo()

    def end_well(self):
        """All ends, the server and the disk are well, and what is left on disk is sent."""
        self.recover()
        for slot, process in list(self.living.items()):
            self.end(slot, "finished", [])
            assert process.offline or not process.run.reports_spooled, "a server that is well was not told all"
        with self.server.hurried():
            outcome = send_folder(self.path, self.server, 100.0, sleep=self.clock.sleep, clock=self.clock.monotonic)
        assert outcome.error is None
        left = [path.read_bytes() for path in self.path.glob("spool/*/*.spool")]
        assert not any(content.startswith(report_log._MAGIC) for content in left), "a spool was not sent"
        assert not self.server.broken, self.server.broken
        for ended in self.ended:
            ended.check(self.server)
        if self.is_alone and not self.server.may_lack_registrations:
            launches = [launch for ended in self.ended for launch in ended.process.launches]
            places = [launches.index(launch) for launch in self.server.launches]
            assert places == sorted(places), f"attempts arrived in the order {places}"

    def trouble(self, troubles):
        self.server.troubles += [trouble for trouble in troubles if trouble not in self.never]

    def process(self, slot, *, offline=False, started=True):
        """The living process in a place, begun where none lives."""
        slot %= self.places
        if slot not in self.living:
            self.is_alone &= not self.living
            self.living[slot] = Process(self.path, offline=offline)
            if started:
                self.living[slot].begin(1)
            self.work(slot, 1)
        return self.living.get(slot) or self.process(slot)

    def bury(self, slot=None):
        """Take the dead from the living."""
        for place, process in list(self.living.items()):
            if place == slot or not process.is_alive:
                process.kill()
                self.server.not_before.clear()
                self.ended.append(Ended(self.living.pop(place)))

    def name(self):
        self.names += 1
        return f"item {self.names}"


class Ended:
    """A process that has ended, and what it said last of its reports."""

    def __init__(self, process):
        self.process = process
        self.made = process.run.reports_made
        refused = sum(count for reason, count in process.run.reports_dropped.items() if reason in SERVER_REASONS)
        self.lost = process.dropped - refused + process.run.reports_pending
        """Reports that it gave up itself, and those that were on their way when it died."""
        if not process.has_died:
            assert process.run.reports_pending == 0

    def numbers(self, reports):
        return {(stream, seq) for stream, seq in reports if stream in self.process.streams}

    def check(self, server):
        """Every report is at the server, or was lost as this process or the server has said."""
        steps = self.process.items
        accepted = {(stream, seq) for stream in self.process.streams for seq in server.accepted[stream]}
        refused = self.numbers(server.refused)
        absent = self.made - len(accepted)
        told = self.lost + len(refused - accepted)
        if self.process.has_died:
            # It may have died between giving way and saying so; the server reads the numbers in the file.
            gaps = [reason for stream in self.process.streams for reason in server.gaps[stream].values()]
            told += max(0, gaps.count("spool_full") - self.process.run.reports_dropped.get("spool_full", 0))
        assert absent <= told, f"{absent - told} reports are lost and nobody has said so"
        assert told <= absent + len(self.numbers(server.repeated) | refused), "more is said to be lost than is"
        for stream in self.process.streams:
            reports = server.accepted[stream]
            told = [name for _, report in sorted(reports.items()) for name in report.scalars if name in steps]
            assert told == sorted(told, key=list(steps).index), "what was told later came earlier"
            assert all(
                report.step == steps[name]
                for report in reports.values()
                for name in report.scalars.keys() & steps.keys()
            )
            if not self.process.has_died:
                known = reports.keys() | server.gaps[stream].keys()
                assert known.issuperset(range(server.newest_batch[stream])), "a gap without a number"


TestDelivery = pytest.mark.slow(DeliveryMachine.TestCase)
# A life is long: a fifth as many by day as a property of numbers has, at night as many.
TestDelivery.settings = settings(max_examples=20 if settings().derandomize else settings().max_examples)
