import pytest

from hybridrl.observability.files import create_run_dir, replaced, write_text_atomic


def test_a_second_run_of_the_same_name_gets_a_folder_of_its_own(tmp_path):
    made = [create_run_dir(tmp_path / "runs", "calc").name for _ in range(3)]

    assert made == ["calc", "calc-2", "calc-3"]


def test_replacing_shows_the_old_content_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "page.html"
    write_text_atomic(path, "old")

    with replaced(path) as temporary:
        temporary.write_text("half of the ne")
        assert path.read_text() == "old"
        temporary.write_text("new")

    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "page.html"
    write_text_atomic(path, "old")

    with pytest.raises(KeyboardInterrupt), replaced(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
