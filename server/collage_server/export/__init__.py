"""A whole run as one stream of bytes: JSON lines, CSV or Parquet, read in short transactions."""

from collage_server.export.lines import jsonl_bytes
from collage_server.export.parquet import parquet_bytes
from collage_server.export.steps import ExportPlan, plan_export
from collage_server.export.table import csv_bytes

__all__ = ["ExportPlan", "csv_bytes", "jsonl_bytes", "parquet_bytes", "plan_export"]
