"""The cold half of a store: layers of whole chunks as immutable Parquet files, in a folder or a bucket.

`files` stores files, `paths` says where, `parquet` and `logged` define their content, `segments` lists them,
`reading` reads layers out of them, `finished` those of finished runs. `collage_server.store.sealing.archiving`
makes them of chunks, and removes those that no row names.
"""
