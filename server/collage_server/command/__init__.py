"""The verbs that the server adds to `collage-monitor`."""
