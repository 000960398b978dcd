"""What a page sends back with its questions: never a table's rows, which a live page would send at each tick."""

from collage_dashboard import create_dashboard


def test_no_question_holds_the_rows_of_a_table(server):
    """A live page of 100 layers sent 18.7 kB of them with each new step."""
    app = create_dashboard(server.client)
    states = [state for entry in app._callback_list for state in entry["state"]]
    assert {"run-record", "run-shown"} <= {state["id"] for state in states}
    assert [state for state in states if state["property"] in {"rowData", "virtualRowData"}] == []
