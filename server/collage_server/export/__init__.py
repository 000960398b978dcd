"""A whole run as one stream of bytes: JSON lines, CSV or Parquet, read in short transactions."""

from collage_server.export.delimited import csv_bytes
from collage_server.export.lines import jsonl_bytes
from collage_server.export.parquet import parquet_bytes
from collage_server.export.slabs import ExportPlan, plan_export

__all__ = ["ExportPlan", "csv_bytes", "jsonl_bytes", "parquet_bytes", "plan_export"]
