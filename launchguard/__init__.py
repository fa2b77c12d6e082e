"""launchguard: predict every rank's memory before a distributed training job starts."""

__version__ = "0.1.0"
