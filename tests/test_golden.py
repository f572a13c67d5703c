import pytest

from tests.conftest import Golden


def test_update_writes_and_compare_passes(tmp_path):
    Golden(tmp_path / "golden", update=True)("plan.txt", "peak 4\n")
    Golden(tmp_path / "golden", update=False)("plan.txt", "peak 4\n")


def test_a_difference_is_shown(tmp_path):
    (tmp_path / "plan.txt").write_text("peak 4\nend\n")
    with pytest.raises(pytest.fail.Exception, match=r"--update-golden[\s\S]*-peak 4\n\+peak 5"):
        Golden(tmp_path, update=False)("plan.txt", "peak 5\nend\n")
    with pytest.raises(pytest.fail.Exception, match="only the end of the last line differs"):
        Golden(tmp_path, update=False)("plan.txt", "peak 4\nend")


def test_a_missing_file_is_a_failure(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="does not exist: write it with"):
        Golden(tmp_path, update=False)("plan.txt", "peak 4\n")


def test_the_folder_is_beside_the_test(golden, request):
    assert golden.folder == request.path.parent / "golden"
