"""Messages may be decoded by several threads from the first one on."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

FIRST_USES = """
import sys
import msgspec
import collage_agent, collage_server.app
import collage_agent.transport.envelope

def described(kind):
    for child in kind.__subclasses__():
        yield child
        yield from described(child)

gathered = set()

def look(frame, event, _argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        gathered.add(kind)

kinds = [kind for kind in described(msgspec.Struct) if kind.__module__.startswith("collage_")]
for kind in kinds:
    sys.setprofile(look)
    try:
        msgspec.json.decode(b"0", type=kind)
    except msgspec.ValidationError:
        pass
    finally:
        sys.setprofile(None)
print(len(kinds), *sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in gathered))
"""


def test_no_type_is_looked_at_for_the_first_time_by_the_thread_that_decodes():
    """msgspec takes a type for known before it has gathered its fields: a second thread reads a null pointer."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=True)
    count, *late = ended.stdout.split()
    assert int(count) > 50
    assert late == []
