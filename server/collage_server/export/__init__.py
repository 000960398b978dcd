"""A whole run as one stream of bytes: JSON lines, CSV or Parquet, read in short transactions."""
