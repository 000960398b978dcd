"""The card of a layer: what windows, residuals and copies say of it, where a run measures them."""

from dataclasses import dataclass

import pytest

from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser]

LAYER = "blocks.1.mlp.up.weight"


@dataclass
class Thorough(GeneratedRun):
    """It measures windows of 64 steps, the residuals of its weights, and their copies in bfloat16."""

    def totals(self, step):
        found = super().totals(step)
        elements, intended = found["elements"], found["intended_squared_sum"]
        return found | {
            "window_intended_squared_sum/64": 64 * intended,
            "window_intended_effective_sum/64": 48 * intended,
            "window_effective_squared_sum/64": 48 * intended,
            "window_active/64": elements,
            "window_lost/64": 0.25 * elements,
            "residual_elements": elements,
            "residual_zero": 0.125 * elements,
            "residual_dropped": 0 * elements,
            "residual_fill_sum": 0.375 * elements,
            "cast_elements/bf16": elements,
            "cast_changed/bf16": 0.0625 * elements,
        }


@pytest.fixture(scope="module")
def runs():
    return [Thorough("thorough", "plus", run_id="run-thorough")]


def test_a_layer_tells_its_windows_residuals_and_copies(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-thorough?layer={LAYER}")
    card = page.locator("#run-layer-card")
    card.get_by_role("heading", name=LAYER).wait_for()
    told = {
        "edq_window_ratio/64": ("EDQ over a window, 64", "0.750"),
        "lost_window_ratio/64": ("Updates lost over a window, 64", "25.0 %"),
        "residual_fill_ratio": ("Residual", "0.3750"),
        "residual_zero_ratio": ("Residual", "12.5 %"),
        "residual_dropped_ratio": ("Residual", "0 %"),
        "cast_changed_ratio/bf16": ("Copies changed, bf16", "6.2 %"),
    }
    for metric, (title, value) in told.items():
        own = card.locator(f"[data-metric='{metric}']")
        assert own.get_by_role("heading").inner_text().startswith(title), metric
        assert own.locator(".value").inner_text() == value, metric
    page.get_by_role("tab", name="States").click()
    for metric in ("residual_fill_ratio", "residual_zero_ratio"):
        page.wait_for_selector(f"""#run-panel [id*='"metric":"{metric}"'] .scatterlayer .trace""", state="attached")
