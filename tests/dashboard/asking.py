"""What a browser asks the application, as it asks it."""


def question(outputs, inputs, state=()):
    """The request that a browser makes: pairs (id, property) and what they are."""
    named = [{"id": name, "property": prop} for name, prop in outputs]
    joined = "...".join(f"{name}.{prop}" for name, prop in outputs)
    return {
        "output": f"..{joined}..",
        "outputs": named,
        "inputs": [{"id": name, "property": prop, "value": value} for name, prop, value in inputs],
        "state": [{"id": name, "property": prop, "value": value} for name, prop, value in state],
        "changedPropIds": [f"{inputs[0][0]}.{inputs[0][1]}"],
    }


def answered(http, asked):
    """The answer's content; None where there is none, since nothing changed."""
    answer = http.post("/_dash-update-component", json=asked)
    assert answer.status_code in {200, 204}
    return answer.get_json()["response"] if answer.status_code == 200 else None


def routing(path="/"):
    """What the application asks for to show a page."""
    inputs = [("address", "pathname", path), ("retry-tick", "data", None)]
    return question([("page", "children"), ("screen", "className")], inputs, [("address", "search", "")])


def layout(browser, path="/"):
    """What the routing callback shows."""
    return browser.post("/_dash-update-component", json=routing(path))
