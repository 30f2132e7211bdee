"""Files: atomic writes, JSON, YAML and torch files of unknown origin, and the errors that name a file."""
