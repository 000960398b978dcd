"""The cold half of a store: layers of whole chunks as immutable Parquet files, in a folder or a bucket.

`files` stores files, `parquet` defines their content, `segments` lists them, `joining` makes them of chunks,
`reading` reads layers out of them, `sweeping` removes those that no row names.
"""
