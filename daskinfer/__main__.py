"""``python -m daskinfer``."""

from .cli import main

raise SystemExit(main())
