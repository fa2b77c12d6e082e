"""What runs inside a rehearsed process, beside the user's script: phase marks, what needs values or peers, side effects, the record.

Started by path (`python .../inside/main.py`), so that the environment of the job need not have launchguard installed; it imports torch and
nothing of launchguard outside this folder.
"""
