"""python -m launchguard"""

from launchguard.cli import main

main()
