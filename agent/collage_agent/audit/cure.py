"""A checkpoint's cure: the findings, the advice, the converted file, the code, and steps that prove it.

`collage-monitor cure` calls it. The work is done in `findings.py`, `checkpoint_advice.py`, `conversion.py` and, for
the steps that prove it, `checked_steps.py`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from collage_agent.audit.checkpoint_advice import advice_about
from collage_agent.audit.checkpoint_audit import audit_checkpoint
from collage_agent.audit.checkpoint_parameters import checkpoint_parameters
from collage_agent.audit.conversion import Conversion, check_output, convert_checkpoint
from collage_agent.audit.findings import AuditFinding
from collage_agent.audit.split_layouts import read_checkpoint
from collage_agent.checked_steps import CheckedSteps
from collage_monitor.diagnosis import Lacking
from collage_monitor.environment import CHECK_REPORT, CHECK_STEPS, CHECKPOINT, VARIABLES, launch_variables
from collage_monitor.errors import CollageError
from collage_monitor.wire import Advice

__all__ = ["Cure", "check_cure", "cure_checkpoint", "render_cure"]

_LACKING: Final[dict[str, Lacking]] = {
    "learning-rate-lost": "weights",
    "single-weight": "weights",
    "master-rounded": "weights",
    "second-moment-stuck": "states",
    "second-moment-zero": "states",
}
"""What is kept too narrow where an audit finds this. Other findings are damage, which no conversion mends."""
_PLACEHOLDER: Final = "{checkpoint}"
_MEASURED: Final = {"mode": "disabled", "every": "1", "budget": "none"}


class Cure(Struct, frozen=True):
    """The findings in a checkpoint, and the cure.

    before, after: findings of the audits of the old checkpoint and of the new one, notes left out. advice: what to
    try, in words; code: the lines to paste once the optimizer is built, before a checkpoint is loaded. output: the
    converted checkpoint; "" where none was written. checked: the verdict of the first steps, one for each watch;
    failures: sentences, each a reason why the check did not pass. cured: nothing was lacking, or the checkpoint is
    converted and no check failed.
    """

    path: str
    before: list[AuditFinding]
    after: list[AuditFinding] = []
    strategy: str = ""
    advice: str = ""
    code: str = ""
    output: str = ""
    conversion: Conversion | None = None
    checked: list[CheckedSteps] = []
    failures: list[str] = []
    cured: bool = False

    @property
    def is_healthy(self) -> bool:
        """Whether the old checkpoint has no finding that a cure is for."""
        return self.cured and not self.strategy


def _cured_path(checkpoint: Path) -> Path:
    """Where the converted checkpoint is written unless another place is named: beside the old one."""
    stem, suffix = (checkpoint.name, "") if checkpoint.is_dir() else (checkpoint.stem, checkpoint.suffix)
    return checkpoint.with_name(f"{stem}-cured{suffix}")


def cure_checkpoint(path: Path, strategy: str | None = None, output: Path | None = None) -> Cure:
    """Audit a checkpoint, and where weights or states are too narrow, write it as the advised strategy keeps it.

    strategy: another one than is advised. output: where to write it; None: see `_cured_path`.

    Raises:
        CheckpointError: nothing that can be read safely, or an output that is there already.
        ValueError: a strategy that does not exist or cannot keep these weights.
    """
    before = _told(path)
    lacking = [finding for finding in before if finding.code in _LACKING]
    if not lacking:
        damaged = [finding.text for finding in before if finding.severity == "problem"]
        words = [f"no conversion mends this: {text}" for text in damaged]
        return Cure(str(path), before, failures=words, cured=not damaged)
    advice = _advice(path, lacking)
    choice = next((entry for entry in advice.choices if entry.strategy), None) if advice is not None else None
    text = advice.text if advice is not None else "nothing here keeps more of these weights"
    if choice is None or choice.strategy is None:
        code = next((entry.code for entry in advice.choices), "") if advice is not None else ""
        return Cure(str(path), before, advice=text, code=code, failures=[f"there is nothing to convert to: {text}"])
    target, output = strategy or choice.strategy, output or _cured_path(path)
    check_output(output)
    converted = convert_checkpoint(path, target)
    converted.write(output)
    after = _told(output)
    left = [finding.text for finding in after if finding.code in _LACKING or finding.severity == "problem"]
    return Cure(
        path=str(path),
        before=before,
        after=after,
        strategy=target,
        advice=text,
        code=choice.code.replace(f'"{choice.strategy}"', f'"{target}"'),
        output=str(output),
        conversion=converted.report,
        failures=[f"still so in the converted checkpoint: {text}" for text in left],
        cured=not left,
    )


def check_cure(cure: Cure, program: Sequence[str], steps: int) -> Cure:
    """The cure, with the verdict of the first steps of a training from the converted checkpoint.

    The training runs as `collage-monitor run` starts it, measured at each step and reported nowhere. Its command
    gets the checkpoint in place of "{checkpoint}" and in COLLAGE_CHECKPOINT. It is ended after the last step.

    Raises:
        CollageError: there is no such program.
    """
    checked, status = _first_steps(program, cure.output or cure.path, steps)
    # Without a conversion the steps alone decide.
    failures = [*(cure.failures if cure.output else ()), *_failures(cure, checked, status, steps)]
    return msgspec.structs.replace(cure, checked=checked, failures=failures, cured=not failures)


def render_cure(cure: Cure) -> str:
    """The cure in plain words: before, what to do, after."""
    if cure.is_healthy:
        warned = [f"  {finding.severity}: {finding.text}" for finding in cure.before]
        return "\n".join([f"{cure.path}: nothing is kept too narrow; it is left as it is", *warned])
    lines = [f"{cure.path}: before"]
    lines += [f"  {finding.severity}: {finding.text}" for finding in cure.before]
    if cure.output and cure.conversion is not None:
        bytes_before, bytes_after = cure.conversion.bytes_before, cure.conversion.bytes_after
        lines += [f"{cure.output}: the same training in strategy {cure.strategy}"]
        lines += [f"  bytes of weights and states: {bytes_before:,} to {bytes_after:,}"]
        lines += [f"  gained: {line}" for line in cure.conversion.gained]
        lines += [f"  cannot be had: {line}" for line in cure.conversion.never_kept]
        lines += [f"  {finding.severity}: {finding.text}" for finding in cure.after] or [
            "  the audit finds nothing"
        ]
    if cure.code:
        place = "before the checkpoint is loaded" if cure.output else "before the optimizer is built"
        lines += [f"paste {place}:", *(f"    {line}" for line in cure.code.splitlines())]
    lines += [
        f"{_of_rank(checked)}steps up to {checked.last_step}: {checked.health}. {checked.text}"
        for checked in cure.checked
    ]
    lines += [f"not cured: {failure}" for failure in cure.failures]
    if cure.cured and cure.checked:
        lines.append(f"cured: {cure.checked[0].steps} steps prove it")
    elif cure.cured:
        repeat = f"remove {cure.output} and repeat the command with --check -- python train.py {{checkpoint}}"
        lines.append(f"converted, not proven yet: {repeat}")
    return "\n".join(lines)


def _told(path: Path) -> list[AuditFinding]:
    return [finding for finding in audit_checkpoint(path).findings if finding.severity != "note"]


def _advice(path: Path, lacking: Sequence[AuditFinding]) -> Advice | None:
    """Advice for the parameters that the findings name; weights come first, because their cure widens states,
    too."""
    kind: Lacking = "weights" if any(_LACKING[finding.code] == "weights" for finding in lacking) else "states"
    named = {layer for finding in lacking if _LACKING[finding.code] == kind for layer in finding.layers}
    parameters, _ = checkpoint_parameters(read_checkpoint(path))
    entries = [entry for entry in parameters if entry.has_state and (entry.name in named or not named)]
    made_anew = any(finding.code == "master-rounded" for finding in lacking)
    # A master weight that equals its weight adds nothing.
    return advice_about(entries, kind, strategy="fp32-states" if made_anew else None)


def _first_steps(program: Sequence[str], checkpoint: str, steps: int) -> tuple[list[CheckedSteps], int]:
    """The verdict of the program's first steps, and its exit status."""
    with tempfile.TemporaryDirectory(prefix="collage-check-") as folder:
        report = Path(folder) / "steps.json"
        added = {VARIABLES[name]: value for name, value in _MEASURED.items()}
        added |= {CHECKPOINT: checkpoint, CHECK_STEPS: str(steps), CHECK_REPORT: str(report)}
        command = [part.replace(_PLACEHOLDER, checkpoint) for part in program]
        try:
            environment = {**os.environ, **launch_variables(os.environ), **added}
            # Its output goes to stderr, because readers of JSON read stdout.
            status = subprocess.run(command, env=environment, stdout=2, check=False).returncode
        except OSError as error:
            raise CollageError(f"{command[0]}: {error.strerror}; pass a program that the shell finds") from error
        read = [
            entry
            for file in (report, *report.parent.glob("steps.*.json"))
            if file.exists()
            for entry in msgspec.json.decode(file.read_bytes(), type=list[CheckedSteps])
        ]
    return _differing(sorted(read, key=lambda entry: entry.rank)), status


def _differing(checked: Sequence[CheckedSteps]) -> list[CheckedSteps]:
    """The outcome of rank 0, and of other ranks if it differs. Only ranks on this machine report."""
    seen: dict[tuple[object, ...], CheckedSteps] = {}
    for entry in checked:
        seen.setdefault((entry.steps, entry.last_step, entry.strategy, entry.health), entry)
    return list(seen.values())


def _failures(cure: Cure, checked: Sequence[CheckedSteps], status: int, steps: int) -> Iterator[str]:
    """Why these steps do not prove the cure, or disprove it."""
    if not checked:
        yield f"the program ended with status {status} before a step of an optimizer was measured"
    for found in checked:
        yield from (f"{_of_rank(found)}{words}" for words in _failures_of(cure, found, status, steps))


def _of_rank(found: CheckedSteps) -> str:
    return f"rank {found.rank}: " if found.rank else ""


def _failures_of(cure: Cure, found: CheckedSteps, status: int, steps: int) -> Iterator[str]:
    begun = found.last_step - found.steps
    if found.steps < steps and status:
        yield f"the program ended with status {status} after {found.steps} of {steps} steps"
    elif found.steps < steps:
        yield f"the program took {found.steps} of {steps} steps; let it train for longer, or pass --steps"
    if cure.conversion is not None and begun < cure.conversion.step:
        yield (
            f"it began after step {begun}, not after step {cure.conversion.step}: it did not load "
            f"{cure.output}; pass {_PLACEHOLDER} in its command, or read {CHECKPOINT}"
        )
    if cure.strategy and found.strategy != cure.strategy:
        yield f"weights are kept as {found.strategy}, not {cure.strategy}: paste the lines above"
    if found.health != "healthy":
        yield f"the first steps are not healthy but {found.health}: {found.text}"
