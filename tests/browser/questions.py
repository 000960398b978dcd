"""What a page asks, as it was before it was compressed."""

import gzip
import json


def question_of(request):
    """The question of a request as Dash wrote it; None where it asks the application nothing."""
    body = request.post_data_buffer
    if not body or "_dash-update-component" not in request.url:
        return None
    return json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)


def asks_for(output):
    """Whether a request or an answer is about this output, 'run-revision.data'."""

    def about(found):
        asked = question_of(getattr(found, "request", found))
        return asked is not None and output in str(asked["output"])

    return about
