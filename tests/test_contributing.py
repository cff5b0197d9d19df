"""What CONTRIBUTING promises about the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imports(file: Path) -> list[str]:
    """The rooms of twofour that a file imports from, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            found += [parts] if len(parts) > 1 else [[*parts, alias.name] for alias in node.names]
    return [parts[1] for parts in found if parts[0] == "twofour" and len(parts) > 1]


def test_imports_only_point_upward_in_its_list():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.search(r"upward in this list: ([^.]*)\.", text)
    assert listed
    order = re.split(r",\s+", listed.group(1))
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "twofour").glob("[a-z]*")} - {"py.typed"}
    assert {room for room in rooms if (ROOT / "twofour" / room).is_dir()} <= set(order) | {"train"}
    seen = 0
    for file in (ROOT / "twofour").rglob("*.py"):
        room = file.relative_to(ROOT / "twofour").parts[0].removesuffix(".py")
        if room not in order:
            continue
        for other in imports(file):
            if other in order:
                seen += 1
                assert order.index(other) <= order.index(room), f"{file}: {room} imports {other}"
    assert seen > 100
