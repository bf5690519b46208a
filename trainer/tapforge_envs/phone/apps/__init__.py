"""The standard phone's apps, one file each: content of a fresh phone, pages, and what gestures do."""
