"""Entry: `python3 -m tools.bootstrap setup|model|lock|where`. Kept to old syntax so that an old Python gets a sentence."""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "headrace: Python 3.11 or newer is needed, this is %d.%d (%s); name a newer one with PYTHON=python3.11\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(1)

from tools.bootstrap.commands import main

sys.exit(main(sys.argv[1:]))
