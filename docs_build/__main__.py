"""``python -m docs_build``: build the pages strictly, and check that they load nothing from other hosts."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
HOST = r"(?:https?:)?//[^\"')\s>]*"
LOADS = re.compile(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*?\b(?:src|href|data)=[\"']?" + HOST)
STYLES = re.compile(r"(?:@import|url\()\s*[\"']?" + HOST)


def loads_from_elsewhere(site: Path) -> list[str]:
    """Return what the pages and styles below ``site`` load from other hosts; links to follow are no loads."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            text = path.read_text()
            for match in (*LOADS.finditer(text), *STYLES.finditer(text)):
                found.append(f"{path.relative_to(site)}: {match.group()}")
    return found


def main() -> int:
    """Build, and return the exit code."""
    if subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT).returncode:
        return 1
    found = loads_from_elsewhere(SITE)
    if found:
        sys.stderr.write("These pages load something from another host:\n  " + "\n  ".join(found) + "\n")
        return 1
    sys.stdout.write(f"wrote {SITE / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
