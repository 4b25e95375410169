"""JSON for people: what comes back is what went in."""

import json

from infer.document import write_document


def test_flat_lists_take_a_line_and_texts_stay_as_they_are(tmp_path):
    document = {
        "counts": [1, 2.5, None],
        "rows": [{"survival": [0.5, 0.25], "talk": "a  [\n1 ]"}],
        "pairs": [[1, 2], [3]],
        "empty": [],
        "texts": ["two  spaces", "a\u2028b", "[\n 1\n]"],
    }
    write_document(tmp_path / "a.json", document)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == document
    assert '\n "counts": [1, 2.5, null],\n' in text and '"survival": [0.5, 0.25],\n' in text
    assert "  [1, 2],\n  [3]\n" in text
