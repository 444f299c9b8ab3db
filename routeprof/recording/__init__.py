"""The on-disk contract: schema, writer, reader, fold."""
