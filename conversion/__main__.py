"""Entry point of `python -m conversion`."""

import sys

from conversion.cli import main

sys.exit(main())
