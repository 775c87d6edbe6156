import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from nxd_ckpt import end_async_saves

pytestmark = pytest.mark.smoke

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES)
def test_readme_example_runs_as_written(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)

    with patch.dict(os.environ):  # one of them sets a variable
        exec(compile(source, str(README), "exec"), {})

    end_async_saves()


def test_readme_has_examples():
    assert EXAMPLES
