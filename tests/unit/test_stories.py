"""Files of stories are read whole, and rewritten where they are meant."""

from pathlib import Path

import pytest
from stories import check_story, read_stories


@pytest.mark.parametrize(
    "text", ["", "# About.\n", "# About.\nwith: a=1\n", "# One.\na\n\n# Two.\n", "a\n\n# Two.\n\nb"]
)
def test_a_story_whose_lines_were_lost_is_noticed(tmp_path: Path, text: str) -> None:
    (tmp_path / "lost.txt").write_text(text)
    with pytest.raises(AssertionError, match=r"lost\.txt: no "):
        read_stories(tmp_path / "lost.txt")


def test_settings_are_those_of_all_stories_behind_them(tmp_path: Path) -> None:
    (tmp_path / "told.txt").write_text("# About.\n\n# A. One\n# more.\nx\n\n# B.\nwith: a=1\n\nwith: b=2\ny → z\n")
    first, second = read_stories(tmp_path / "told.txt")
    assert (first.name, first.title, first.settings, first.lines) == ("A", "A. One more.", {}, ("x",))
    assert (second.settings, second.lines) == ({"a": 1, "b": 2}, ("y → z",))


def test_a_story_is_rewritten_in_its_own_place_also_if_another_begins_with_its_title(tmp_path: Path) -> None:
    path = tmp_path / "told.txt"
    path.write_text("# A node. It leaves.\nx → old\n\n# A node.\nx → old\n\n# A node.\nwith: b=1\nx → old\ny\n")
    second, third = read_stories(path)[1:]
    for story in (second, third):
        check_story(path, story, {"x": "new", "y": ""}.__getitem__, rewrite=True)
    assert path.read_text() == (
        "# A node. It leaves.\nx → old\n\n# A node.\nx → new\n\n# A node.\nwith: b=1\nx → new\ny\n"
    )
