"""The page of a report holds everything itself, and what is not ours in it is text."""

import base64
from html.parser import HTMLParser

from infer.html import page


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.cells = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href") if name in given]
        if tag == "td":
            self.cells.append(given["data-value"])


def test_tables_and_pictures_are_inside(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    rows = [
        {"dataset": "<b>maths</b>", "mat": 2.25, "survival": [0.5], "gap": None},
        {"dataset": "chat", "mat": 1.5, "survival": [0.25], "gap": 0.125},
    ]
    text = page("title & more", [("rows", rows)], ["a < b"], [tmp_path / "a.png"])
    reader = Reader()
    reader.feed(text)
    assert reader.links == [f"data:image/png;base64,{base64.b64encode(b'picture').decode()}"]
    assert reader.cells == ["<b>maths</b>", "2.25", "", "chat", "1.5", "0.125"]
    assert "b" not in reader.tags and reader.tags.count("th") == 3 and reader.tags.count("tr") == 3
    assert ">2.250<" in text and "title &amp; more" in text and "a &lt; b" in text
