"""Write docs/cluster-file.md from the settings in cluster/spec. Run it when a setting changes; a test notices."""

from __future__ import annotations

from pathlib import Path

from cluster.spec.page import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cluster-file.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
