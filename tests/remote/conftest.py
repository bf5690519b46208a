"""The S3-compatible server of these tests."""

from tests.s3 import bucket, s3_server

__all__ = ["bucket", "s3_server"]
