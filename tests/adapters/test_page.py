"""Tables of HTML pages."""

from __future__ import annotations

import re

from cacheclip_rag.adapters import html_table, whole_page


def test_each_figure_has_its_title_on_a_phone() -> None:
    """Where there is no head of the table. Texts have none."""
    table = html_table(("", "line", "tokens", "<lost>"), [("1", "two words", "3", "4 <small>5%</small>")], {"line"})
    titles = re.findall(r'<td data-title="(.*?)">(.*?)</td>', table)
    assert titles == [("tokens", "3"), ("&lt;lost&gt;", "4 <small>5%</small>")]
    assert '<td class="text" dir="auto">two words</td>' in table and '<th scope="col" class="text"' in table


def test_cells_wrap_on_a_phone() -> None:
    """Also where a page's own style keeps them on one line."""
    assert "tbody tr td { border: 0; padding: 0; text-align: left; white-space: normal;" in whole_page("")
