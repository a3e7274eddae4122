"""What all rooms share: the table that reports print."""

from kmp._common import table


def test_a_table_is_aligned():
    assert table([["name", "n"], ["a", "10"], ["long name", "1"]]).splitlines() == [
        "name        n",
        "a          10",
        "long name   1",
    ]


def test_a_cell_is_printed_as_it_is():
    """No markup, no emoji, no wrapping; wide characters take two places."""
    cells = [
        ["policy", "speed"],
        ["[bold]a", "[0.9, 1.1]"],
        [":smile:" + "x" * 300, ""],
        ["層", "1"],
    ]
    lines = table(cells).splitlines()
    assert len(lines) == 4 and lines[1].startswith("[bold]a ") and lines[1].endswith("[0.9, 1.1]")
    assert lines[2] == ":smile:" + "x" * 300
    assert len(lines[3]) == len(lines[1]) - 1
