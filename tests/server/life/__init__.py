"""The life of data: export, import, back-up, retention, deletion, the disk budget."""
