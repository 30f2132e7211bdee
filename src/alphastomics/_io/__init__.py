"""Files: errors, and readers of files that anyone may have written."""
